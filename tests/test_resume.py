"""Deaths, and what comes after them: a run that was killed goes on with the numbers of one that was not.

All runs are PPO on the toy task: 8 steps, 3 to an epoch, with what a checkpoint has to bring back: a critic,
two optimizers, a learning rate schedule, the adaptive KL coefficient, the best validation and the position in
the data. The reward function notes every answer, sampled in training or validation (`Run.answers`).
"""

import json
import re
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from runs import Run, repeatable

PPO = ["algorithm.advantage=gae", "algorithm.kl_in_reward=true", "algorithm.kl_target=0.1",
       "algorithm.kl_horizon=500", "actor.schedule=cosine", "actor.warmup=2", "actor.mini_batch_size=36",
       "critic.lr=1e-3", "critic.mini_batch_size=36", "data.batch_size=18", "rollout.n=4",
       "reward.function=tests/runs.py:record", "data.num_workers=1",  # one process scores in order
       "validation.every=3", "validation.temperature=1.0", "trainer.steps=8", "trainer.save_every=1",
       "trainer.keep=8"]
# train_ppo.py, but it is killed in the save of step 4, when only trainer.json and the folder's name are missing.
DYING = """
import os
import signal
import sys
import train_ppo

def finish_save(self, beside, final, whole=train_ppo.Trainer.finish_save):
    if final.name == "step_4":
        os.kill(os.getpid(), signal.SIGKILL)
    whole(self, beside, final)

train_ppo.Trainer.finish_save = finish_save
train_ppo.run(train_ppo.configuration.from_command_line(sys.argv.pop(1)))
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
VALIDATION, STEP = 55, 18 * 4  # answers
HALF = VALIDATION + 3 * STEP + VALIDATION  # those of steps 0 to 3
STARTED = []


def start(directory, *overrides, **options):
    STARTED.append(Run(directory, *PPO, *overrides, stderr_apart=True, **options))
    return STARTED[-1]


def saved(run, step):
    return (run.directory / "checkpoints" / f"step_{step}").exists()


def kill_in_rollout(run, step, dead=None):
    """SIGKILL of the engine in the middle of a rollout after this step; `dead` is one that was killed before.
    Returns its process."""
    # It is looked for early: a slow machine may need longer for that than for the steps that are left. SGLang's
    # title, sglang::scheduler, comes late, and not at all where the first variable of the environment has a new
    # value by then (setproctitle looks for the title's place from there; Ray hands variables on in any order).
    engine = run.find("sglang::sch|--multiprocessing-fork", lambda engine: engine != dead)
    worker = engine.parent()  # Ray puts its method into its title, which is empty while it is written anew
    run.until(lambda: saved(run, step))
    run.until(lambda: worker.cmdline()[:1] == ["ray::Worker.generate"])
    engine.kill()
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
    """Equal bit for bit: weights, optimizers, the numbers of updates, and the trainer's own."""
    assert state.keys() == other.keys()
    for name, value in state.items():
        equal = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert equal, name
    assert any(name.endswith("exp_avg_sq") for name in state) and any(name.endswith("updates") for name in state)
    weights(state)


# ---- The runs ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where all runs are, one after the other: Ray gives its own processes 30 s to start, on the one core there is."""
    yield tmp_path_factory.mktemp("runs")
    for run in STARTED:  # what a failed test leaves behind
        run.kill()


@pytest.fixture(scope="module")
def straight(folder):
    """Eight steps in one go, without Ray."""
    run = start(folder / "straight", "launch=local")
    assert run.wait() == 0, run.said()
    run.assert_nothing_left()
    return run


@pytest.fixture(scope="module")
def killed(folder):
    """Six steps and more by two runs with Ray. The first dies while step 4 is being saved, so that step 3, the end of
    an epoch, is the newest whole one. Nothing but its driver is killed: the others must notice.

    The second goes on at once and may restart once. Its engine is killed twice, in a rollout after step 4, which should be
    that of step 5, and in one after step 6.
    """
    directory = folder / "killed"
    first = start(directory, command=(sys.executable, "-c", DYING))
    assert first.wait() == -signal.SIGKILL, first.said()
    unfinished = directory / "checkpoints" / "unfinished"
    assert unfinished.exists() and saved(first, 3) and not saved(first, 4)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(directory / name, "a") as file:
            file.write('{"step": 5, "val')  # a kill may also cut a line

    second = start(directory, "trainer.max_restarts=1")
    killed = [kill_in_rollout(second, 4)]
    second.until(lambda: "restart 1 of 1" in second.errors.read_text())
    killed.append(kill_in_rollout(second, 6, dead=killed[0]))
    second.code = second.wait(60)
    second.assert_nothing_left()
    first.assert_nothing_left()
    return SimpleNamespace(first=first, second=second, engines=[engine.pid for engine in killed])


@pytest.fixture(scope="module")
def ranks(folder, straight):
    """Two ranks make step 4 from the straight run's step 3, and one makes step 5 from that. In the first run
    a rank is killed, in the second the Ray worker."""
    directory = folder / "ranks"
    shutil.copytree(straight.directory, directory)
    for step in range(4, 9):
        shutil.rmtree(directory / "checkpoints" / f"step_{step}")
    two, program = start(directory, command=TORCHRUN), f"{sys.executable} -u train_ppo.py"
    rank1 = two.find(program, lambda rank: rank.environ().get("RANK") == "1")
    two.until(lambda: saved(two, 4))
    rank1.kill()
    two.code = two.wait(60)
    two.assert_nothing_left()
    assert not saved(two, 5)

    one = start(directory)
    worker = one.find("ray::Worker")
    one.until(lambda: saved(one, 5))
    worker.kill()
    one.code = one.wait(60)
    one.assert_nothing_left()
    return SimpleNamespace(two=two, one=one)


# ---- Numbers -----------------------------------------------------------------------------------------------


def test_this_run_has_state_to_lose(straight):
    """If these did not change from step to step, the tests below could not see that they were lost."""
    rows = straight.rows()
    assert [row["step"] for row in rows] == list(range(9))
    for name in ("reward/mean", "reward/kl_coef", "actor/lr", "actor/grad_norm", "critic/grad_norm"):
        assert len({row[name] for row in rows[1:7]}) == 6, name
    prompts = [line.split("=")[0] for line in answers(straight)[VALIDATION:]]
    first, second = prompts[: 3 * STEP], prompts[3 * STEP + VALIDATION :][: 3 * STEP]
    assert len(set(first)) == len(set(second)) == 3 * 18
    assert first != second


def test_killed_in_a_save_after_an_epoch_it_goes_on_with_the_same_numbers(straight, killed, tmp_path):
    """SIGKILL while a checkpoint was half written, lines cut in the middle, and the same command again: it
    continues from the newest whole one. Rows, answers, weights and all other state, to step 6, are those of
    the straight run, bit for bit; also after step 4, where the engine was killed and the run has restarted."""
    second = killed.second
    assert f"resumed from {second.directory}/checkpoints/step_3: 5 of 8 steps to go\n" in second.log.read_text()
    assert exact(second.rows())[:7] == exact(straight.rows())[:7]
    samples = [(run.directory / "samples.jsonl").read_text().splitlines() for run in (straight, second)]
    assert samples[0][: 3 * VALIDATION] == samples[1] and json.loads(samples[1][-1])["step"] == 6
    half = 3 * STEP + VALIDATION  # those of steps 4 to 6
    assert answers(second)[:half] == answers(straight)[HALF:][:half] and len(answers(second)) >= half
    for step in (4, 5, 6):
        assert_same_state(state(second, step, tmp_path), state(straight, step, tmp_path))
    assert not (second.directory / "checkpoints" / "unfinished").exists()


def test_the_same_seed_is_the_same_run(straight, killed, tmp_path):
    """Started twice from nothing, once with Ray and once without: what both have done is equal."""
    done = HALF + STEP
    assert answers(killed.first) == answers(straight)[:done]
    assert exact(killed.second.rows())[:4] == exact(straight.rows())[:4]
    assert_same_state(state(killed.first, 3, tmp_path), state(straight, 3, tmp_path))


@pytest.mark.parametrize("name, step", [("two", 4), ("one", 5)])
def test_another_number_of_ranks_continues(straight, ranks, tmp_path, name, step):
    """Saved by 1 rank and continued by 2, and the reverse: the next prompts, their answers and the position
    in the data are those of the straight run; metrics and weights after the step are, to 1e-5."""
    run, done = getattr(ranks, name), HALF + (step - 4) * STEP
    assert f"resumed from {run.directory}/checkpoints/step_{step - 1}: {9 - step} of 8 steps to go\n" in run.log.read_text()
    assert answers(run)[:STEP] == answers(straight)[done : done + STEP]
    row, expected = (repeatable(run.rows())[step] for run in (run, straight))
    assert row == pytest.approx(expected, rel=1e-5, abs=1e-5)
    state_now, state_then = (state(run, step, tmp_path) for run in (run, straight))
    assert state_now["trainer.json"]["prompts"] == state_then["trainer.json"]["prompts"]
    for tensor, expected in weights(state_then).items():
        torch.testing.assert_close(state_now[tensor], expected, rtol=1e-5, atol=1e-5)


# ---- Deaths ------------------------------------------------------------------------------------------------
# That a run ends within 60 s and leaves no process is checked where it is killed, above.


def test_a_dead_rank_ends_torchrun(ranks):
    """SIGKILL of one of two ranks."""
    assert ranks.two.code not in (0, 2)
    assert "SIGKILL" in ranks.two.errors.read_text()


def test_a_dead_worker_ends_the_run(ranks):
    """SIGKILL of the Ray worker."""
    assert ranks.one.code not in (0, 2)
    assert "ActorDiedError" in ranks.one.errors.read_text()


def test_a_dead_engine_ends_the_run_which_restarts_by_itself(killed):
    """SIGKILL of the engine in the middle of a rollout, twice. With trainer.max_restarts=1 the run goes on from
    its newest checkpoint after the first; its numbers are in the tests above. stderr has both reasons."""
    run, errors = killed.second, killed.second.errors.read_text()
    assert run.code not in (0, 2)
    assert errors.count(", in generate\n") >= 2 and errors.count("restart 1 of 1") == 1
    for pid in killed.engines:
        assert f"engine process {pid} has died, exit code -9" in errors
    assert re.search(r"resumed from .*/step_(4: 4|5: 3) of 8 steps to go\n", run.log.read_text())
