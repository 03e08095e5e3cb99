"""What a run has in its directory: checkpoints, lines of numbers and samples, and the batches of its steps.

`trainer.record` keeps each step's scored batch, `trainer.replay` learns from such a folder without an engine.
A kill may come at any moment: a file is written beside, then renamed.
"""

import io
import json
import zipfile
from pathlib import Path

import torch

import data


def checkpoints(directory):
    """The whole checkpoints of a run directory, oldest first."""
    steps = {path.name.removeprefix("step_"): path for path in (directory / "checkpoints").glob("step_*")}
    return [steps[step] for step in sorted(filter(str.isdecimal, steps), key=int)]


def state(checkpoint):
    """What the trainer has left in a checkpoint. Raises ValueError, in one line, where it cannot be read."""
    with data.blame("trainer.dir", f"{checkpoint}/trainer.json"):
        found = json.loads((checkpoint / "trainer.json").read_text())
        return {name: found[name] for name in ("step", "kl_coef", "best", "prompts", "trains")}


def write(path, content):
    """Puts bytes into a file that is whole at every moment: the new one, or what was there."""
    beside = path.with_suffix(".unfinished")
    beside.write_bytes(content)
    beside.replace(path)


def record(directory, step, batch, metrics):
    """Keep a scored batch and what was measured of it, whole or not at all."""
    folder, whole = directory / "records", io.BytesIO()
    folder.mkdir(exist_ok=True)
    torch.save((batch, metrics), whole)  # in memory: torch does not say that a disk is full
    write(folder / f"step_{step}.pt", whole.getbuffer())


def replay(folder, step):
    """(batch, metrics) as another run recorded them, without its times and memory."""
    batch, metrics = torch.load(f"{folder}/step_{step}.pt", weights_only=False)
    return batch, {name: x for name, x in metrics.items() if not name.startswith(("time/", "mem/"))}


def check(config, steps):
    """Raises ValueError, in one line, for records that are not there, not whole, or of another batch."""
    folder = Path(config.trainer.replay)
    for step in range(1, steps + 1):
        if not zipfile.is_zipfile(folder / f"step_{step}.pt"):
            raise ValueError(f"trainer.steps={steps}: there is no whole {folder}/step_{step}.pt")
    responses, wanted = len(replay(folder, 1)[0]["uid"]), config.data.batch_size * config.rollout.n
    if responses > wanted or responses < wanted and not config.algorithm.dynamic_sampling:
        raise ValueError(f"trainer.replay={folder}: step_1.pt has {responses} responses; "
                         f"data.batch_size * rollout.n is {wanted}")


def trim(directory, step):
    """Cut metrics.jsonl and samples.jsonl back to what the checkpoint of a step knows; what came later will
    come again."""
    if not step and (directory / "metrics.jsonl").exists():
        print(f"{directory} has no checkpoint (trainer.save_every): it begins again at step 0", flush=True)
    for path in (directory / "metrics.jsonl", directory / "samples.jsonl"):
        if path.exists():
            lines = path.read_text().splitlines(True) if step else []  # 0: also that row comes again
            whole = [line for line in lines if line.endswith("\n")]  # a kill may have cut the last one
            write(path, "".join(line for line in whole if json.loads(line)["step"] <= step).encode())
