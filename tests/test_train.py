"""Whole runs of the toy recipe, as a user starts them: real Ray, real engine, one process tree each."""

import json
import signal
import sys
from pathlib import Path

import psutil
import pytest
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2ForSequenceClassification

import records
from recipes import toy
from runs import Run, repeatable


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Four steps in one go, with Ray, and what was seen on the way."""
    run = Run(tmp_path_factory.mktemp("runs") / "straight", "trainer.steps=4", "validation.every=2")
    run.wait_for_step(1)
    run.listening = [
        (process.name(), connection.laddr.ip)
        for process in run.processes()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert run.wait() == 0, run.log.read_text()[-3000:]
    return run


def test_a_run_leaves_its_records_and_no_process(straight):
    straight.assert_nothing_left()
    rows = straight.rows()
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    wanted = {"reward/mean", "response/length_mean", "response/truncated", "actor/ppo_kl", "actor/clipfrac", "actor/entropy"}
    wanted |= {"actor/grad_norm", "rollout/logprob_diff_max", "perf/tokens_per_second", "time/step", "time/rollout"}
    wanted |= {"time/sync", "time/update_actor", "mem/sync/trainer0", "mem/sleep/engine_00"}
    assert all(wanted <= row.keys() for row in rows[1:])
    assert all("val/toy/mean@1" in rows[step] for step in (0, 2, 4))
    assert "<svg" in (straight.directory / "report.html").read_text()
    samples = [json.loads(line) for line in (straight.directory / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 3 * 55
    assert [path.name for path in (straight.directory / "checkpoints").iterdir()] == ["step_4"]


def test_on_policy_steps_have_ratio_one(straight):
    for row in straight.rows()[1:]:
        assert abs(row["actor/ppo_kl"]) < 1e-6
        assert row["actor/clipfrac"] == 0
        assert row["rollout/logprob_diff_max"] < 1e-5
    assert any(row["actor/grad_norm"] > 0 for row in straight.rows()[1:])


def test_nothing_listens_beyond_this_machine(straight):
    assert straight.listening
    assert {ip for _, ip in straight.listening} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, straight.listening


def test_a_run_that_is_killed_continues_as_if_it_was_not(straight, tmp_path):
    """SIGKILL to every process after step 2, the same command again: the rows are those of the straight run,
    which had Ray, while these have not."""
    overrides = ("trainer.steps=4", "validation.every=2", "trainer.save_every=1", "launch=local")
    first = Run(tmp_path / "killed", *overrides)
    first.wait_for_step(2)
    first.kill()
    first.assert_nothing_left()
    second = Run(tmp_path / "killed", *overrides)
    assert second.wait() == 0, second.log.read_text()[-3000:]
    assert "resumed from" in second.log.read_text()
    assert repeatable(second.rows()) == repeatable(straight.rows())


def test_a_directory_has_one_run_and_ctrl_c_ends_it(tmp_path):
    run = Run(tmp_path / "interrupted", "trainer.steps=1000")
    run.wait_for_step(1)
    other = Run(run.directory, "trainer.steps=1000")
    assert other.wait() == 2 and run.process.poll() is None
    assert f"error: trainer.dir={run.directory} is in use by another run" in other.log.read_text()
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) != 0
    run.assert_nothing_left()


def test_two_ranks_share_sequences_and_an_engine(tmp_path):
    """Two SPMD ranks: Ulysses, one tensor-parallel engine, an adapter whose absence is the reference, a reward
    model beside a function that raises for one prompt, which costs only its samples, and an export."""
    shape = AutoConfig.from_pretrained(toy.build(), num_labels=1)
    Qwen2ForSequenceClassification(shape).save_pretrained(tmp_path / "reward")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    options = ["model.sp=2", "rollout.tp=2", "actor.lora_rank=4", "actor.kl_coef=0.01", "trainer.export=true",
               "trainer.profile_steps=[2, 9]",  # of the steps that there are
               f"reward_model.path={tmp_path}/reward", "reward.function=tests/rewards.py:raises_on_zero"]
    run = Run(tmp_path / "spmd", *options, "trainer.steps=2", "validation.before=false", command=torchrun)
    assert run.wait(400) == 0, run.log.read_text()[-3000:]
    run.assert_nothing_left()
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2]
    assert sum(row["reward/errors"] for row in rows) > 0 and "raises_on_zero" in run.log.read_text()
    assert rows[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-9) and rows[1]["actor/kl_loss"] > 0
    assert all(row["reward/mean"] * 128 % 1 > 1e-3 for row in rows)  # the function alone gives 0 or 1
    assert all(abs(row["actor/ppo_kl"]) < 1e-6 and row["rollout/logprob_diff_max"] < 1e-4 for row in rows)
    assert AutoModelForCausalLM.from_pretrained(run.directory / "export").num_parameters() == 75264
    assert (run.directory / "export/adapter/adapter_model.safetensors").exists()
    assert all((run.directory / f"trace_rank{rank}.json.gz").stat().st_size > 1000 for rank in range(2))


def test_records_outlive_a_full_disk_in_a_resume(tmp_path, monkeypatch):
    """What a resume keeps of the records is written beside them first: nothing is lost when that fails."""
    rows = "".join(f'{{"step": {step}}}\n' for step in range(4))
    (tmp_path / "metrics.jsonl").write_text(rows + '{"st')
    write_text = Path.write_text

    def full(path, text):
        write_text(path, text[:5])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError):
        records.trim(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == rows + '{"st'
    monkeypatch.undo()
    records.trim(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == rows[: rows.index('{"step": 3}')]


def test_a_reward_that_always_raises_ends_the_run_with_its_traceback(tmp_path):
    run = Run(tmp_path / "raises", "reward.function=tests/rewards.py:raises", "launch=local")
    assert run.wait() not in (0, 2)
    assert "ZeroDivisionError" in run.log.read_text()
    run.assert_nothing_left()
