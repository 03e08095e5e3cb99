"""Deaths, and what comes after them: a run that was killed goes on with the numbers of one that was not.

All runs are PPO on the toy task: 6 steps, 3 to an epoch, with what a checkpoint has to bring back: a critic,
two optimizers, a learning rate schedule, the adaptive KL coefficient, the best validation and the position in
the data. The reward function notes every answer, sampled in training or validation (`Run.answers`).
"""

import json
import shutil
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from runs import Run, repeatable

PPO = ["algorithm.advantage=gae", "algorithm.kl_in_reward=true", "algorithm.kl_target=0.1",
       "algorithm.kl_horizon=500", "actor.schedule=cosine", "actor.warmup=2", "actor.mini_batch_size=36",
       "critic.lr=1e-3", "critic.mini_batch_size=36", "data.batch_size=18", "rollout.n=4",
       "reward.function=tests/runs.py:record", "data.num_workers=1",  # one process scores in order
       "validation.every=3", "validation.temperature=1.0", "trainer.steps=6", "trainer.save_every=1",
       "trainer.keep=6"]
LOCAL = "launch=local"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
VALIDATION, STEP = 55, 18 * 4  # answers
HALF = VALIDATION + 3 * STEP + VALIDATION  # those of steps 0 to 3
STARTED = []


@pytest.fixture(scope="module", autouse=True)
def end_of_all_runs():
    """What a failed test leaves running ends with the tests."""
    yield
    for run in STARTED:
        run.kill()


def start(directory, *overrides, **options):
    STARTED.append(Run(directory, *PPO, *overrides, stderr_apart=True, **options))
    return STARTED[-1]


def said(run):
    """The ends of what a run wrote, for a failure."""
    return "\n".join(path.read_text()[-3000:] for path in (run.log, run.errors))


def until(run, seen, timeout=300):
    """What `seen()` gives as soon as it is true; the run must be alive until then."""
    deadline = time.monotonic() + timeout
    while not (found := seen()):
        assert run.process.poll() is None, said(run)
        assert time.monotonic() < deadline, f"not seen in {timeout} s: {said(run)}"
        time.sleep(0.002)
    return found


def saved(run, step):
    return (run.directory / "checkpoints" / f"step_{step}").exists()


def engine_in_rollout(run):
    """The engine's process, in the middle of a rollout: Ray puts a worker's method into its title."""
    worker, engine = (run.processes(title)[0] for title in ("ray::Worker", "sglang::scheduler"))
    until(run, lambda: worker.cmdline()[0] == "ray::Worker.generate")
    return engine


def exact(rows):
    """What must be equal bit for bit, and NaN too."""
    return [{name: repr(value) for name, value in row.items()} for row in repeatable(rows)]


def answers(run):
    return run.answers.read_text().splitlines()


def state(run, step, tmp_path):
    """All that a checkpoint holds: by name, tensors and numbers; and trainer.json."""
    folder, whole = run.directory / "checkpoints" / f"step_{step}", tmp_path / "state.pt"
    found = {"trainer.json": json.loads((folder / "trainer.json").read_text())}

    def collect(name, value):
        if isinstance(value, (dict, list)):
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                collect(f"{name}.{key}", part)
        else:
            found[name] = value

    for role in ("actor", "critic"):
        dcp_to_torch_save(folder / role, whole)
        collect(role, torch.load(whole))
    return found


def weights(state):
    models = "actor.model.", "critic.model."
    found = {name: value for name, value in state.items() if name.startswith(models)}
    assert len(found) > 40
    return found


def assert_same_state(state, other):
    """Equal bit for bit: weights, optimizers, schedules, and the trainer's own."""
    assert state.keys() == other.keys()
    for name, value in state.items():
        equal = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert equal, name
    assert any(name.endswith("exp_avg_sq") for name in state) and any("last_epoch" in name for name in state)
    weights(state)


# ---- Killed and started again ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Six steps in one go."""
    run = start(tmp_path_factory.mktemp("runs") / "straight", LOCAL)
    assert run.wait() == 0, said(run)
    run.assert_nothing_left()
    return run


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Six steps in three runs of one directory: the first dies in a save, the second at the end of an epoch.

    The first is a driver with Ray, and nothing but the driver is killed.
    """
    directory = tmp_path_factory.mktemp("runs") / "killed"
    first = start(directory)
    driver, unfinished = psutil.Process(first.process.pid), directory / "checkpoints" / "unfinished"
    until(first, lambda: saved(first, 1))
    while True:
        until(first, unfinished.exists)
        driver.suspend()
        until(first, lambda: driver.status() == psutil.STATUS_STOPPED)
        if unfinished.exists():
            break
        driver.resume()  # it was faster
    whole = max(step for step in range(1, 6) if saved(first, step))
    driver.kill()
    assert first.wait(60) != 0
    first.assert_nothing_left(within=60)
    assert unfinished.exists()
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(directory / name, "a") as file:
            file.write(f'{{"step": {whole + 1}, "val')  # a line that is cut in the middle

    second = start(directory, LOCAL)
    until(second, lambda: saved(second, 3))
    second.process.kill()
    second.kill()
    second.assert_nothing_left()
    assert not saved(second, 4)

    third = start(directory, LOCAL)
    assert third.wait() == 0, said(third)
    third.assert_nothing_left()
    return SimpleNamespace(first=first, second=second, third=third, whole=whole)


def test_this_run_has_state_to_lose(straight):
    """If these did not change from step to step, the tests below could not see that they were lost."""
    rows = straight.rows()
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    for name in ("reward/mean", "reward/kl_coef", "actor/lr", "actor/grad_norm", "critic/grad_norm"):
        assert len({row[name] for row in rows[1:]}) == 6, name
    prompts = [line.split("=")[0] for line in answers(straight)[VALIDATION:]]
    first, second = prompts[: 3 * STEP], prompts[3 * STEP + VALIDATION :][: 3 * STEP]
    assert len(set(first)) == len(set(second)) == 3 * 18
    assert first != second


def test_killed_at_the_end_of_an_epoch_it_goes_on_with_the_same_numbers(straight, killed, tmp_path):
    """SIGKILL of every process after step 3 of 6 and the same command again: rows, answers, weights and all
    other state are those of the straight run, bit for bit."""
    third = killed.third
    assert f"resumed from {third.directory}/checkpoints/step_3" in third.log.read_text()
    assert exact(third.rows()) == exact(straight.rows())
    samples = [(run.directory / "samples.jsonl").read_text() for run in (straight, third)]
    assert samples[0] == samples[1] and samples[0].count("\n") == 3 * VALIDATION
    assert answers(third) == answers(straight)[HALF:]
    for step in (4, 6):
        assert_same_state(state(third, step, tmp_path), state(straight, step, tmp_path))


def test_killed_during_a_save_it_goes_on_from_the_newest_whole_checkpoint(straight, killed, tmp_path):
    """SIGKILL of the driver while a checkpoint is half written, and a line cut in the middle in both records.
    What the next run adds, up to step 3, is what the straight run has."""
    second, whole = killed.second, killed.whole
    assert f"resumed from {second.directory}/checkpoints/step_{whole}" in second.log.read_text()
    done = VALIDATION + whole * STEP
    assert answers(second)[: HALF - done] == answers(straight)[done:HALF]
    assert exact(second.rows())[:4] == exact(straight.rows())[:4]
    assert_same_state(state(second, 3, tmp_path), state(straight, 3, tmp_path))
    assert not (second.directory / "checkpoints" / "unfinished").exists()


def test_the_same_seed_is_the_same_run(straight, killed):
    """Started twice from nothing, once with Ray and once without: what both have done is equal."""
    done = VALIDATION + killed.whole * STEP
    assert answers(killed.first)[:done] == answers(straight)[:done]
    assert exact(killed.third.rows())[: killed.whole + 1] == exact(straight.rows())[: killed.whole + 1]


# ---- Other numbers of ranks --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(straight, tmp_path_factory):
    """From the straight run's step 3 two ranks make step 4, from that one makes step 5. Both get killed."""
    directory = tmp_path_factory.mktemp("runs") / "ranks"
    shutil.copytree(straight.directory, directory)
    for step in (4, 5, 6):
        shutil.rmtree(directory / "checkpoints" / f"step_{step}")
    two, program = start(directory, command=TORCHRUN), f"{sys.executable} -u train_ppo.py"
    rank1 = until(two, lambda: [p for p in two.processes(program) if p.environ().get("RANK") == "1"])[0]
    until(two, lambda: saved(two, 4))
    rank1.kill()
    two.code = two.wait(60)
    two.assert_nothing_left()
    assert not saved(two, 5)

    one = start(directory)
    worker = until(one, lambda: one.processes("ray::Worker"))[0]
    until(one, lambda: saved(one, 5))
    worker.kill()
    one.code = one.wait(60)
    one.assert_nothing_left()
    return SimpleNamespace(two=two, one=one)


@pytest.mark.parametrize("name, step", [("two", 4), ("one", 5)])
def test_another_number_of_ranks_continues(straight, ranks, tmp_path, name, step):
    """Saved by 1 rank and continued by 2, and the reverse: the next prompts, their answers and the position
    in the data are those of the straight run; metrics and weights after the step are, to 1e-5."""
    run, done = getattr(ranks, name), HALF + (step - 4) * STEP
    assert f"resumed from {run.directory}/checkpoints/step_{step - 1}" in run.log.read_text()
    assert answers(run)[:STEP] == answers(straight)[done : done + STEP]
    row, expected = (repeatable(run.rows())[step] for run in (run, straight))
    assert row == pytest.approx(expected, rel=1e-5, abs=1e-5)
    state_now, state_then = (state(run, step, tmp_path) for run in (run, straight))
    assert state_now["trainer.json"]["prompts"] == state_then["trainer.json"]["prompts"]
    for tensor, expected in weights(state_then).items():
        torch.testing.assert_close(state_now[tensor], expected, rtol=1e-5, atol=1e-5)


# ---- Deaths ------------------------------------------------------------------------------------------------


def test_a_dead_rank_ends_torchrun(ranks):
    """SIGKILL of one of two ranks: within 60 s it is over, nothing is left, and stderr says what it was."""
    assert ranks.two.code not in (0, 2)
    assert "SIGKILL" in ranks.two.errors.read_text()


def test_a_dead_worker_ends_the_run(ranks):
    """SIGKILL of a Ray worker: the same."""
    assert ranks.one.code not in (0, 2)
    assert "ActorDiedError" in ranks.one.errors.read_text()


def test_a_dead_engine_ends_the_run(straight, tmp_path):
    """SIGKILL of the engine in the middle of a rollout: the same. Its seed is another: so are its numbers."""
    run = start(tmp_path / "engine", "seed=2")
    until(run, lambda: saved(run, 1))
    engine = engine_in_rollout(run)
    engine.kill()
    assert run.wait(60) not in (0, 2)
    run.assert_nothing_left()
    errors = run.errors.read_text()
    assert f"engine process {engine.pid} has died, exit code -9" in errors and "generate" in errors
    assert exact(run.rows())[1] != exact(straight.rows())[1]
    assert answers(run)[VALIDATION:][:STEP] != answers(straight)[VALIDATION:][:STEP]


def test_it_restarts_by_itself(straight, tmp_path):
    """trainer.max_restarts=1 and an engine that is killed once: the end is that of the straight run."""
    run = start(tmp_path / "restarts", "trainer.max_restarts=1")
    until(run, lambda: saved(run, 2))
    engine = engine_in_rollout(run)
    engine.kill()
    until(run, lambda: "restart 1 of 1" in run.errors.read_text(), timeout=60)
    assert run.wait(300) == 0, said(run)
    run.assert_nothing_left()
    assert f"engine process {engine.pid} has died" in run.errors.read_text()
    assert exact(run.rows()) == exact(straight.rows())
    assert_same_state(state(run, 6, tmp_path), state(straight, 6, tmp_path))
