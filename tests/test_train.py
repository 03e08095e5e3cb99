"""Whole runs of the toy recipe, as a user starts them: real Ray, real engine, one process tree each."""

import contextlib
import json
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2ForSequenceClassification

import records
import train_ppo
from config import load
from recipes import toy
from runs import Run, repeatable


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
FOUR_STEPS = "trainer.steps=4", "validation.every=2"
# train_ppo.py, but the second rank fails in its third update.
FAILING = """
import sys
import train_ppo
from workers import Worker

class Failing(Worker):
    updates = 0

    def update(self, *args):
        self.updates += 1
        if (self.rank, self.updates) == (1, 3):
            raise ArithmeticError("rank 1 fails")
        return super().update(*args)

def import_libraries(whole=train_ppo.import_libraries):
    whole()
    train_ppo.Worker = Failing

train_ppo.import_libraries = import_libraries
train_ppo.run(train_ppo.configuration.from_command_line(sys.argv.pop(1)))
"""


def listening(process):
    """(name, address) of each of its sockets that listens, or nothing if it has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        sockets = process.net_connections("tcp")
        return [(process.name(), one.laddr.ip) for one in sockets if one.status == psutil.CONN_LISTEN]
    return []


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Four steps in one go, with Ray, and what was seen on the way."""
    run = Run(tmp_path_factory.mktemp("runs") / "straight", *FOUR_STEPS, "trainer.record=true")
    run.wait_for_step(1)
    run.process.send_signal(signal.SIGSTOP)  # the driver: nothing ends while we look
    run.listening = [found for process in run.processes() for found in listening(process)]
    run.process.send_signal(signal.SIGCONT)
    assert run.wait() == 0, run.said()
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
    assert len({(sample["step"], sample["prompt"]) for sample in samples}) == len(samples) == 3 * 55
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


def test_a_run_that_is_ended_and_killed_continues_as_if_it_was_not(straight, tmp_path):
    """SIGTERM after step 1, the same command again, SIGKILL to every process in the next, and once more: the rows
    are those of the straight run. That had Ray, as the first of these has; the others have not."""
    overrides = *FOUR_STEPS, "trainer.save_every=1"
    first = Run(tmp_path / "ended", *overrides)
    first.wait_for_step(1)
    first.process.send_signal(signal.SIGTERM)  # for which Ray has two handlers, one of them in C++
    assert first.wait(60) == 128 + signal.SIGTERM
    said = first.log.read_text()
    assert "ended by SIGTERM" in said and "PC: @" not in said
    first.assert_nothing_left()
    reached = first.rows()[-1]["step"]
    assert reached < 4
    second = Run(tmp_path / "ended", *overrides, "launch=local")
    second.wait_for_step(reached + 1)
    second.kill()
    second.assert_nothing_left()
    third = Run(tmp_path / "ended", *overrides, "launch=local")
    assert third.wait() == 0, third.log.read_text()[-3000:]
    assert "resumed from" in third.log.read_text()
    assert repeatable(third.rows()) == repeatable(straight.rows())
    kept = [path.name for path in (third.directory / "checkpoints").iterdir()]
    assert kept == ["step_4"]  # trainer.keep=1


def test_sigterm_while_ray_starts_is_named(tmp_path):
    """Ray's own handler, which it would put in place of ours then, says nothing."""
    run = Run(tmp_path / "run", "trainer.steps=1")
    run.find(str(Path(ray.__file__).parent / "core/src/ray/gcs/gcs_server"))
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(60) == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in run.log.read_text()
    run.assert_nothing_left()


def test_pools_and_a_rank_that_raises(straight, tmp_path):
    """Two Ray workers have the actor and a third one, in a pool of its own, the reference; they learn what the
    straight run has recorded. The first step is its first step. Then a rank raises while the other one waits
    for it: the run ends with that traceback. Two ranks under torchrun have the same numbers."""
    pools = ["ray.num_cpus=3", "pools.main.devices_per_node=2", "pools.main.roles=[actor, rollout]",
             "pools.b={nodes: 1, devices_per_node: 1, roles: [ref]}", "actor.kl_coef=0.1"]
    run = Run(tmp_path / "pools", *pools, "trainer.steps=4", f"trainer.replay={straight.directory}/records",
              command=(sys.executable, "-c", FAILING))
    assert run.wait() not in (0, 2)
    run.assert_nothing_left()
    assert "ArithmeticError: rank 1 fails" in run.log.read_text()
    first, second = run.rows()
    for name in ("actor/grad_norm", "actor/entropy", "actor/ppo_kl", "reward/mean"):
        assert first[name] == pytest.approx(straight.rows()[1][name], rel=1e-5, abs=1e-6)
    assert first["actor/kl_loss"] == pytest.approx(0, abs=1e-9) and second["actor/kl_loss"] > 0
    held = {name.partition("/update_actor/")[2] for name in first if name.startswith("mem/update_actor/")}
    assert held == {"main_trainer0", "main_trainer1", "b_trainer0"}

    spmd = Run(tmp_path / "spmd", "actor.kl_coef=0.1", "trainer.steps=2", f"trainer.replay={straight.directory}/records",
               command=TORCHRUN)  # two ranks in place of Ray's two workers
    assert spmd.wait() == 0, spmd.log.read_text()[-3000:]
    for ours, rays in zip(repeatable(spmd.rows()), repeatable(run.rows()), strict=True):
        assert ours == pytest.approx(rays, rel=1e-6, abs=1e-6)


def test_two_ranks_share_sequences_and_an_engine(tmp_path):
    """Two SPMD ranks: Ulysses, one tensor-parallel engine, an adapter whose absence is the reference, a reward
    model beside a function that raises for one prompt, which costs only its samples, and an export."""
    shape = AutoConfig.from_pretrained(toy.build(), num_labels=1)
    Qwen2ForSequenceClassification(shape).save_pretrained(tmp_path / "reward")
    options = ["model.sp=2", "rollout.tp=2", "actor.lora_rank=4", "actor.kl_coef=0.01", "trainer.export=true",
               "trainer.profile_steps=[2, 9]",  # of the steps that there are
               f"reward_model.path={tmp_path}/reward", "reward.function=tests/rewards.py:raises_on_zero"]
    run = Run(tmp_path / "spmd", *options, "trainer.steps=2", "validation.before=false", command=TORCHRUN)
    assert run.wait() == 0, run.log.read_text()[-3000:]
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


@pytest.mark.parametrize("keep", [1, 3])
def test_older_checkpoints_go_after_a_newer_one_is_whole(keep, tmp_path, monkeypatch):
    """And step_10 is newer than step_9."""
    config, prompts = load([], [f"trainer.keep={keep}"]), SimpleNamespace(state_dict=dict)
    trainer = SimpleNamespace(config=config, prompts=prompts, directory=tmp_path, kl_coef=0.0, best=0.0)
    folder, remove = tmp_path / "checkpoints", shutil.rmtree

    def remove_one(path):
        assert (folder / f"step_{trainer.step}/trainer.json").exists()
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", remove_one)
    monkeypatch.setattr(train_ppo, "records", records, raising=False)  # which run() imports
    (folder / "step_3_copied").mkdir(parents=True)  # somebody else's
    for trainer.step in range(8, 13):
        (folder / "unfinished").mkdir()
        train_ppo.Trainer.finish_save(trainer, folder / "unfinished", folder / f"step_{trainer.step}")
        steps = range(max(8, trainer.step + 1 - keep), trainer.step + 1)
        assert [path.name for path in records.checkpoints(tmp_path)] == [f"step_{step}" for step in steps]


@pytest.mark.parametrize("text, words", [
    ("", "JSONDecodeError: Expecting value"), ('{"step"', "JSONDecodeError: Expecting ':'"), ("{}", "KeyError: 'step'"),
    ("[]", "TypeError: list indices")])
def test_a_broken_checkpoint_is_named(text, words, tmp_path):
    (tmp_path / "trainer.json").write_text(text)
    with pytest.raises(ValueError, match=f"trainer.dir={tmp_path}/trainer.json: {words}"):
        records.state(tmp_path)


def test_records_outlive_a_full_disk_in_a_resume(tmp_path, monkeypatch):
    """What a resume writes anew is written beside first: nothing is lost when that fails."""
    rows = "".join(f'{{"step": {step}}}\n' for step in range(4))
    (tmp_path / "metrics.jsonl").write_text(rows + '{"st')
    config, begin, begun = load([], []), train_ppo.Trainer.begin, "seed: 1\n"
    (tmp_path / "config.yaml").write_text(begun)
    trainer = SimpleNamespace(config=config, directory=tmp_path, resumed=None, step=2)
    monkeypatch.setattr(train_ppo, "records", records, raising=False)  # which run() imports
    write_bytes = Path.write_bytes

    def full(path, content):
        write_bytes(path, content[:5])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    for write in (lambda: records.trim(tmp_path, 2), lambda: begin(trainer)):
        with pytest.raises(OSError):
            write()
    assert (tmp_path / "metrics.jsonl").read_text() == rows + '{"st'
    assert (tmp_path / "config.yaml").read_text() == begun
    monkeypatch.undo()
    records.trim(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == rows[: rows.index('{"step": 3}')]
