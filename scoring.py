"""Scores: of responses by a reward function, in processes of their own, and of a validation.

A function is any of recipes/rewards.py or of the reader's own file. What it raises, or how long it takes,
costs its sample and no more.
"""
import asyncio
import contextlib
import ctypes
import inspect
import math
import multiprocessing
import numbers
import os
import signal
import sys
import traceback
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path

import numpy
import pebble
import psutil
import torch

from data import load_function

PACKAGES = {"math": "math_verify", "reasoning_gym": "reasoning_gym"}


def reward_function(spec):
    """What `path/to/file.py:function` names, or a function's name alone in recipes/rewards.py."""
    function = load_function(spec, "reward.function", str(Path(__file__).parent / "recipes/rewards.py"))
    try:
        inspect.signature(function).bind("response", "answer", "row")
    except TypeError as error:
        right = f"it is called with (response, answer, row) and takes {inspect.signature(function)}"
        raise ValueError(f"reward.function={spec}: {error}; {right}") from error
    return function


def score_one(spec, response, answer, row):
    """One score as a dict of floats, and perhaps the text `prediction`. Keys become text, NumPy's numbers
    count as numbers, and what is no number is dropped. Any error leaves as a RuntimeError: others need not
    survive pickling."""
    try:
        result = reward_function(spec)(response, answer, row)
        result = asyncio.run(result) if asyncio.iscoroutine(result) else result
        result = result if isinstance(result, dict) else {"score": result}
        result["score"] = math.nan if result["score"] is None else float(result["score"])
        if torch.tensor(result["score"]).isinf():  # as is 1e39, in float32
            raise ValueError("an infinite score would make the loss NaN")
        real = numbers.Real, numpy.bool_  # the first includes NumPy's other numbers
        found = {str(key): float(value) for key, value in result.items() if isinstance(value, real)}
        return found | {key: str(result[key]) for key in ("prediction",) if key in result}
    except BaseException:
        raise RuntimeError(traceback.format_exc()) from None


def _begin(spec):
    """The start of a scoring process: it will die with the trainer, and loads the function beforehand."""
    os.close(forkserver._forkserver._forkserver_alive_fd)  # for which our parent would outlive the trainer
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGTERM, _end)  # from the pool, after a timeout and at the end
    reward_function(spec)


def _end(*_):
    """The end of a scoring process and of what its function has started."""
    for process in psutil.Process().children(recursive=True):  # of a judge that runs code, say
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(1)


def last_turn(ids, mask):
    """The ids of the last run of ones in the mask: what the model wrote last."""
    end = len(mask) - int((mask.flip(0).cumsum(0) == 0).sum())
    return ids[end - int(mask[:end].flip(0).cumprod(0).sum()) : end]


def placed(mask, score, turn_rewards):
    """[T]: turn rewards where they are, the rest of the score on the last token that the model wrote."""
    last = mask.nonzero()[-1:, 0]  # [1], or [0] where it wrote none
    return turn_rewards.index_add(0, last, (score - turn_rewards.sum()).float().expand(len(last)))


class Rewards:
    """Scores responses in processes that can be killed: a function that hangs or crashes costs its sample.

    `options` is the config's `reward` section; `max_response_length` is in tokens.
    """

    def __init__(self, options, tokenizer, max_response_length, workers=2):
        self.options, self.tokenizer, self.max_response_length = options, tokenizer, max_response_length
        self.shown = set()  # what has failed, and been shown
        # a trainer with threads must not be forked
        multiprocessing.set_forkserver_preload(["scoring", PACKAGES.get(options.function, "scoring")])
        self.pool = pebble.ProcessPool(workers, context=multiprocessing.get_context("forkserver"),
                                       initializer=_begin, initargs=(options.function,))

    def close(self):
        self.pool.stop()
        self.pool.join()

    def report_failures(self, what, errors, total):
        """Show the first error of a run. When all of a step's samples failed, it ends the run."""
        if not errors:
            return
        text = f"{what}: {len(errors)} of {total} samples failed: {errors[0]}"
        if len(errors) == total:
            raise RuntimeError(text)
        if what not in self.shown:
            print(text, file=sys.stderr)
            self.shown.add(what)

    def ask(self, texts, batch):
        """Each response's result, as `score_one` has it, or {} where the function or the interaction failed.
        Returns (results, metrics of the function's failures)."""
        function, seconds = self.options.function, self.options.timeout
        tasks = [(function, *task) for task in zip(texts, batch["answer"], batch["entry"])]
        futures = [self.pool.schedule(score_one, task, timeout=seconds) for task in tasks]
        errors = [future.exception() for future in futures if future.exception()]  # waits
        timeouts = sum(isinstance(error, TimeoutError) for error in errors)
        self.report_failures(function, errors, len(tasks))
        last = [story[-1] for story in batch.get("transcript", [])]
        broken = [message["content"] for message in last if message["role"] == "error"]
        self.report_failures("rollout.interaction", broken, len(tasks))
        results = [{} if future.exception() or end == "error" else future.result()
                   for future, end in zip(futures, batch["finish_reason"])]
        return results, {"reward/errors": len(errors) - timeouts, "reward/timeouts": timeouts}

    def __call__(self, batch, training=True):
        """Scores every response: returns (batch with new columns, metrics), raises RuntimeError if all fail
        or none has a score.

        New columns: response (text of the model's last turn), scores (float; NaN where the function gave None
        or NaN), raw_scores (before penalties; NaN where nothing is trained), prediction (the function's, or
        the text), token_level_scores (1-D: the score on the last token the model wrote, and what an
        interaction gave on the last token of its turn, else 0). The function's other numbers become metrics
        reward/<key>.
        The batch's model_scores (floats), if it has them, are added to the scores. In training, scores
        include the penalty for nearing max_response_length (DAPO, arXiv 2503.14476, eq. 13), and with
        mask_truncated a cut response has a response_mask of 0.
        """
        options, masks, limit = self.options, batch["response_mask"], self.max_response_length
        turns = [last_turn(ids, mask) for ids, mask in zip(batch["response_ids"], masks)]
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in turns]
        results, failures = self.ask(texts, batch)
        scores = torch.tensor([r.get("score", options.fallback) for r in results], dtype=torch.float64)
        scores += torch.tensor(batch.get("model_scores", 0.0))
        turn_rewards = batch.get("turn_rewards") or [torch.zeros(len(mask)) for mask in masks]
        scores += torch.tensor([rewards.sum() for rewards in turn_rewards])
        if scores.isnan().all() and len(scores):
            raise RuntimeError(f"{options.function}: {len(scores)} of {len(scores)} samples have no score")
        lengths = torch.tensor([mask.sum() for mask in masks]).double()
        metrics = {**failures, "reward/mean": scores.nanmean(),
                   "reward/std": scores[~scores.isnan()].std(correction=0),
                   "response/length_mean": lengths.mean(), "response/length_max": lengths.max(),
                   "response/truncated": batch["finish_reason"].count("length") / len(masks)}
        for name in ("turns", "tool_calls", "tool_errors") if "transcript" in batch else ():
            metrics[f"response/{name}"] = sum(batch[name]) / len(masks)
        batch = {**batch, "response": texts, "raw_scores": scores.tolist()}
        if training and options.overlong_buffer:
            room = limit - torch.tensor([len(mask) for mask in masks])  # what others wrote takes it, too
            scores -= options.overlong_penalty * (1 - room / options.overlong_buffer).clamp(0, 1)
        batch["scores"] = scores.tolist()
        batch["prediction"] = [r.get("prediction", text.strip()) for r, text in zip(results, texts)]
        batch["token_level_scores"] = [placed(*row) for row in zip(masks, scores, turn_rewards)]
        for name in sorted({name for result in results for name in result} - {"score", "prediction"}):
            mean = torch.tensor([result.get(name, math.nan) for result in results]).nanmean()
            metrics.setdefault(f"reward/{name}", mean)  # ours have the right to their names
        if training and options.mask_truncated:
            cut = [end == "length" for end in batch["finish_reason"]]
            batch["response_mask"] = [mask * (not out) for mask, out in zip(masks, cut)]
            # For dynamic sampling: what is not trained makes no difference to a group.
            batch["raw_scores"] = [math.nan if out else raw for raw, out in zip(batch["raw_scores"], cut)]
        return batch, {name: float(value) for name, value in metrics.items()}


def validation_metrics(batch, n):
    """val/<source>/<what>@n for a scored batch of n samples per prompt: the mean score, and for n > 1 pass@n,
    the best of a prompt's scores, and maj@n, the score of its most frequent prediction. What was not scored
    is left out of the mean, and 0 in the others."""
    metrics, starts = {}, range(0, len(batch["scores"]), n)
    scores = torch.tensor(batch["scores"], dtype=torch.float64).view(-1, n)
    frequent = [Counter(batch["prediction"][start : start + n]).most_common(1)[0][0] for start in starts]
    first = [batch["prediction"].index(word, start) for word, start in zip(frequent, starts)]
    values = {"mean": scores.nanmean(1)}
    if n > 1:
        known = scores.nan_to_num(0.0)
        values |= {"pass": known.amax(1), "maj": known.flatten()[first]}
    sources = batch["source"][::n]
    for source in sorted(set(sources)):
        mine = torch.tensor([name == source for name in sources])
        for what, value in values.items():
            metrics[f"val/{source}/{what}@{n}"] = value[mine].nanmean().item()
    return metrics
