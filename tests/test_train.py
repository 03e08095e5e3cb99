"""Whole runs of the toy recipe, as a user starts them: real Ray, real engine, one process tree each."""

import json
import signal
import sys

import psutil
import pytest

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
    """SIGKILL to every process after step 2, the same command again: the rows are those of the straight run."""
    overrides = ("trainer.steps=4", "validation.every=2", "trainer.save_every=1")
    first = Run(tmp_path / "killed", *overrides)
    first.wait_for_step(2)
    first.kill()
    first.assert_nothing_left()
    second = Run(tmp_path / "killed", *overrides)
    assert second.wait() == 0, second.log.read_text()[-3000:]
    assert "resumed from" in second.log.read_text()
    assert repeatable(second.rows()) == repeatable(straight.rows())


def test_ctrl_c_ends_everything(tmp_path):
    run = Run(tmp_path / "interrupted", "trainer.steps=1000")
    run.wait_for_step(1)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) != 0
    run.assert_nothing_left()


def test_two_ranks_under_torchrun_with_a_critic_and_a_raising_reward(tmp_path):
    """PPO with critic, reference and adaptive KL on two SPMD ranks; one prompt's reward raises and costs only its sample."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ppo = ["algorithm.advantage=gae", "algorithm.kl_in_reward=true", "algorithm.kl_target=0.1", "critic.lr=1e-3",
           "critic.mini_batch_size=128", "reward.function=tests/rewards.py:raises_on_zero"]
    run = Run(tmp_path / "spmd", *ppo, "trainer.steps=3", command=torchrun)
    assert run.wait(400) == 0, run.log.read_text()[-3000:]
    run.assert_nothing_left()
    rows = run.rows()[1:]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert sum(row["reward/errors"] for row in rows) > 0
    assert all(row["critic/grad_norm"] > 0 and "critic/explained_variance" in row and "reward/kl" in row for row in rows)
    assert all(abs(row["actor/ppo_kl"]) < 1e-6 for row in rows)
    assert "raises_on_zero" in run.log.read_text()


def test_a_reward_that_always_raises_ends_the_run_with_its_traceback(tmp_path):
    run = Run(tmp_path / "raises", "reward.function=tests/rewards.py:raises", "launch=local")
    assert run.wait() not in (0, 2)
    assert "ZeroDivisionError" in run.log.read_text()
    run.assert_nothing_left()
