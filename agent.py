"""Episodes: the model writes, tools or an interaction answer, and the model goes on.

rollout.py plays one `Episode` per sample, all of them at once, so no episode waits for another. Ids go in and
ids come out: what the model wrote is never encoded again, and of the chat only new messages are rendered. The
engine is known here as `write` only. Left out: turns that see images, calls while the model still writes.
"""

import asyncio
import concurrent.futures
import contextlib
import copy
import functools
import inspect
import json
import logging
import math
import os
import re
import threading
import traceback

import torch

import data

MARK = "\ufdd0"  # a code point that is no character: where a text is cut before it is encoded
ASKED = {"role": "user", "content": "x"}
REPLY = "<think>\nx\n</think>\n\ny"  # what the model might say, as the templates of thinking models write it
LONGEST_TOKEN = 128  # characters; a tool's text is cut at so many per token of the whole response


# ---- Tools and interactions --------------------------------------------------------------------------------


def maker(spec, arguments, key):
    """What makes one episode's instance of `path/to/file.py:name`: a function, called with `arguments` beside
    its own, or a class, constructed with them, with `__call__` and perhaps `create(row)` and `close()`."""
    named = data.load_function(spec, key)
    takes, is_class = inspect.signature(named), inspect.isclass(named)
    asked = ["messages", "row"] if key == "rollout.interaction" else []
    given = [] if is_class else asked
    try:
        takes.bind_partial(*given, **arguments)  # an unknown name says more than a missing one
        if is_class or asked:  # for a tool that is a function the model gives the rest
            takes.bind(*given, **arguments)
        if is_class and "__call__" not in dir(named):
            raise TypeError("it has no __call__")
        if is_class and asked:
            takes = inspect.signature(named.__call__)
            takes.bind("self", *asked)
    except TypeError as error:
        raise ValueError(f"{key}={spec}: {error}; it takes {takes}") from error
    if is_class:
        return functools.partial(named, **arguments)
    return lambda: functools.partial(named, **arguments)


def tool_schemas(tools):
    """JSON schemas of `rollout.tools` ({spec: arguments}), from type hints and docstrings (Google style).

    What YAML gives is not the model's to choose and does not appear. Raises ValueError for a tool without
    hints or docstring, and for a name that two have.
    """
    from transformers.utils import get_json_schema

    schemas = []
    for spec, arguments in tools.items():
        named = data.load_function(spec, "rollout.tools")
        try:
            schema = get_json_schema(named.__call__ if inspect.isclass(named) else named)
        except Exception as error:  # of the helper, about hints and docstrings
            raise ValueError(f"rollout.tools={spec}: {' '.join(str(error).split())}") from error
        schema["function"]["name"] = spec.rpartition(":")[2]
        parameters, given = schema["function"]["parameters"], {} if inspect.isclass(named) else arguments
        parameters["properties"] = {n: p for n, p in parameters["properties"].items() if n not in given}
        parameters["required"] = [n for n in parameters.get("required", []) if n not in given]
        schemas.append(schema)
    names = [schema["function"]["name"] for schema in schemas]
    if len(set(names)) < len(names):
        raise ValueError(f"rollout.tools has a name twice: {', '.join(names)}")
    return schemas


async def finished(function, seconds, /, *args, **kwargs):
    """The result of a function, sync or async, or TimeoutError. A sync one has a thread of its own, so that
    it holds nobody up; one that hangs keeps it until the process ends. An async one must not block."""
    future = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # so that it takes a result also after the timeout

    def work():
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # also exit() and StopIteration, which asyncio would act upon
            usual = isinstance(error, Exception) and not isinstance(error, StopIteration)
            future.set_exception(error if usual else RuntimeError(repr(error)))

    threading.Thread(target=work, daemon=True).start()
    try:
        async with asyncio.timeout(seconds) as limit:
            result = await asyncio.wrap_future(future)
            return await result if inspect.isawaitable(result) else result
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"no answer within {seconds} s") from None
        raise  # its own
    except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
        if asyncio.current_task().cancelling():  # we are to end, with over-sampling
            raise
        raise RuntimeError(repr(error)) from None


# ---- The chat template -------------------------------------------------------------------------------------


class Chat:
    """Renders what stands between two turns of the model, as it stands in the whole chat rendered at once.

    Raises ValueError, with the reason, for a template with which that cannot be.
    """

    def __init__(self, tokenizer, schemas, roles):
        self.tokenizer, self.schemas = tokenizer, schemas or None
        if not tokenizer.chat_template:
            raise ValueError("rollout.tools and rollout.interaction need a tokenizer with a chat template")
        control = sorted(filter(None, tokenizer.get_added_vocab()), key=len, reverse=True)
        self.control = re.compile("|".join(map(re.escape, control)) or "(?!)")
        self.base = [ASKED, {"role": "assistant", "content": REPLY}]
        self.known = len(self.text([ASKED])) + len(REPLY)
        for role in roles:
            try:
                self.check(role)
            except Exception as error:  # templates raise what they like
                raise ValueError(f"the chat template cannot have turns with {role}: {error}") from error

    def check(self, role):
        """A chat must only ever grow, in text and in ids, or the trainer would learn from ids that the model
        has not seen."""
        messages = [ASKED]
        for _ in range(2):
            before, new = self.text(messages), [{"role": role, "content": "z"}]
            messages = [*messages, self.base[1], *new]
            after = self.text(messages)
            if not after.startswith(before + REPLY):
                raise ValueError("it rewrites earlier turns (many drop the thinking in them)")
            if self.ids(after) != self.ids(before) + self.ids(REPLY) + self.between(new):
                raise ValueError("its turns have other ids alone than in the whole")

    def text(self, messages):
        options = {"tools": self.schemas, "tokenize": False, "add_generation_prompt": True}
        return self.tokenizer.apply_chat_template(messages, **options)

    def ids(self, text):
        pieces = [self.tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in text.split(MARK)]
        return [token for piece in pieces for token in piece]

    def between(self, messages):
        """Ids from the end of what the model said (its end-of-turn token comes first) to the start of its
        next turn, with new messages. What looks like a control token in them is cut up and stays text."""
        plain = []
        for message in messages:
            content = message["content"].encode(errors="replace").decode().replace(MARK, "")
            plain.append({**message, "content": self.control.sub(lambda found: MARK.join(found[0]), content)})
        return self.ids(self.text([*self.base, *plain])[self.known :])


# ---- The episode -------------------------------------------------------------------------------------------


class Agent:
    """What all episodes share, as the `rollout` section of the config says. Without tools and interaction an
    episode is one turn, and no text is looked at.

    Raises ValueError, in one line, for a tool, a parser or a chat template that cannot work.
    """

    def __init__(self, config, tokenizer):
        rollout = config.rollout
        self.tokenizer, self.seconds, self.max_turns = tokenizer, rollout.tool_timeout, rollout.max_turns
        self.room = rollout.max_response_length
        self.turn_room = rollout.max_turn_tokens or self.room
        self.makers = {}  # by name of the tool; None is the interaction's
        for key, role in (("tools", "tool"), ("interaction", "user")):
            for spec, arguments in getattr(rollout, key).items():
                name = spec.rpartition(":")[2] if role == "tool" else None
                self.makers[name] = maker(spec, arguments, f"rollout.{key}")
        self.schemas = tool_schemas(rollout.tools)
        self.talks = bool(self.makers)
        if self.talks:
            roles = ["tool"] * bool(rollout.tools) + ["user"] * bool(rollout.interaction)
            self.chat = Chat(tokenizer, self.schemas, roles)
        if rollout.tools:
            self.parser = call_parser(rollout.tool_parser, self.schemas, tokenizer)


def call_parser(name, schemas, tokenizer):
    """SGLang's reader of the tool calls that models of one family write."""
    os.environ["SGLANG_FORWARD_UNKNOWN_TOOLS"] = "1"  # or a call of an unknown tool looks like none
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)  # the model hears of it
    known = FunctionCallParser.ToolCallParserEnum
    if name not in known:
        raise ValueError(f"rollout.tool_parser={name!r} must be one of {', '.join(known)}")
    return FunctionCallParser([Tool.model_validate(schema) for schema in schemas], name, tokenizer)


class Episode:
    """One sample in the making: `play` it, and read its `columns`. `row` is its row of the batch."""

    def __init__(self, agent, row):
        self.agent, self.row = agent, row
        self.entry = copy.deepcopy(row.get("entry"))  # tools may change theirs
        self.ids, self.mask, self.logprobs, self.rewards = [], [], [], []  # an entry per token
        self.turns, self.finish_reason = 0, "abort"
        self.transcript, self.made = [], []  # messages after the prompt; this episode's tools, to be closed,
        self.opened = {}  # and by name those that are ready
        self.tool_calls = self.tool_errors = 0

    async def play(self, write):
        """Turn after turn, until nobody answers ("stop", or "length" if the turn was cut), there is no room
        ("length"), `rollout.max_turns` are over ("turns"), or the interaction fails ("error").

        write: coroutine function (ids, most tokens, turn) -> (new ids, log-probs, "stop" or "length").
        """
        try:
            await self.take_turns(write, self.row["prompt_ids"].tolist())
        finally:  # also when it is aborted
            for tool in self.made:
                if hasattr(tool, "close"):
                    await self.attempt(self.finish(tool.close))

    async def take_turns(self, write, prompt):
        agent = self.agent
        while True:
            most = min(agent.turn_room, agent.room - len(self.ids))
            written, logprobs, end = await write(prompt + self.ids, most, self.turns)
            self.add(written, 1.0, logprobs)
            self.turns += 1
            self.finish_reason = end  # "length" also where `rollout.max_turn_tokens` has cut the turn
            answers = await self.answers(written[:-1] if end == "stop" else written) if agent.talks else []
            if not answers:
                return
            between = agent.chat.between(answers)
            if between[:1] == written[-1:]:  # the end of its turn: the model has written that itself
                between = between[1:]
            if len(self.ids) + len(between) >= agent.room:
                self.finish_reason = "length"
                return
            self.add(between, 0.0, [0.0] * len(between))
            self.transcript += answers

    def add(self, ids, mask, logprobs):
        self.ids += ids
        self.mask += [mask] * len(ids)
        self.logprobs += logprobs
        self.rewards += [0.0] * len(ids)

    async def answers(self, written):
        """Messages that answer the model's turn. None end the episode."""
        agent, said = self.agent, self.agent.tokenizer.decode(written)
        self.transcript.append({"role": "assistant", "content": said})
        full, over = len(self.ids) == agent.room, self.turns == agent.max_turns
        answers = []
        if agent.schemas and agent.parser.has_tool_call(said):
            if not full and not over:
                return await self.call_tools(said)
            answers = [said]  # it would go on, but nobody would read an answer: no call is made
        elif None in agent.makers:
            answers = await self.interact()
        if answers and (full or over):
            self.finish_reason = "length" if full else "turns"
            return []
        return answers

    async def call_tools(self, said):
        """Every call's result, or what is wrong with it."""
        try:
            calls = self.agent.parser.parse_non_stream(said)[1]
        except Exception:  # of SGLang's parsers, about what models write
            calls = []
        if not calls:
            self.tool_errors += 1
            return [{"role": "tool", "content": "error: this tool call cannot be read"}]
        answers = []
        for call in calls:
            self.tool_calls += 1
            text = await self.attempt(self.use(call.name, call.parameters))
            text = text[: LONGEST_TOKEN * self.agent.room]
            known = {"name": call.name} if call.name in self.agent.makers else {}
            answers.append({"role": "tool", **known, "content": text})
        return answers

    async def use(self, name, parameters):
        """What the tool says, as text."""
        functions = {schema["function"]["name"]: schema["function"] for schema in self.agent.schemas}
        if name not in functions:
            raise ValueError(f"there is no tool {name!r}; there is {', '.join(functions)}")
        arguments, known = json.loads(parameters), functions[name]["parameters"]["properties"]
        if not isinstance(arguments, dict) or arguments.keys() - known.keys():
            raise TypeError(f"the arguments of {name} are {', '.join(known)}")
        result = await self.finish(await self.open(name), **arguments)
        return result if isinstance(result, str) else json.dumps(result, default=str)

    async def interact(self):
        """The interaction's answer; its reward lands on the last token of the model's turn."""
        try:
            messages = copy.deepcopy([*self.row["prompt"], *self.transcript])
            answer = await self.finish(await self.open(None), messages, self.entry)
            if not isinstance(answer, (tuple, list)) or answer[0] is None and not answer[1]:
                raise TypeError(f"{answer!r} is not (text, done) or (text, done, reward)")
            text, done, *reward = answer
            self.rewards[-1] = torch.tensor(float(*reward)).item()  # 0 where there is none; 1e39 is infinite
            if not math.isfinite(self.rewards[-1]):
                raise ValueError("a reward that is not finite would make the loss NaN")
        except Exception:
            self.transcript.append({"role": "error", "content": traceback.format_exc()})
            self.finish_reason, self.rewards[-1], done = "error", 0.0, True
        return [] if done else [{"role": "user", "content": str(text)}]

    async def open(self, name):
        """This episode's own instance of a tool, or of the interaction (None), made at its first use."""
        if name not in self.opened:
            tool = await self.finish(self.agent.makers[name])
            self.made.append(tool)  # it is closed also where its create fails
            if hasattr(tool, "create"):
                await self.finish(tool.create, self.entry)
            self.opened[name] = tool
        return self.opened[name]

    async def finish(self, function, /, *args, **kwargs):
        return await finished(function, self.agent.seconds, *args, **kwargs)

    async def attempt(self, coroutine):
        """Its result, or a text about what went wrong, which is counted."""
        try:
            return await coroutine
        except Exception as error:
            self.tool_errors += 1
            with contextlib.suppress(Exception):  # an error may fail to say what it is
                return f"error: {type(error).__name__}: {error}"
            return f"error: {type(error).__name__}"

    def columns(self):
        """The sample's entries in the batch. Those of tokens are 1-D tensors over the response, which is what
        the model wrote (response_mask 1) and what came between its turns (0, and so is the log-prob)."""
        columns = {
            "response_ids": torch.tensor(self.ids, dtype=torch.int64),
            "response_mask": torch.tensor(self.mask),
            "rollout_logprobs": torch.tensor(self.logprobs),
            "turns": self.turns,
            "finish_reason": self.finish_reason,
        }
        if self.agent.talks:
            columns["turn_rewards"] = torch.tensor(self.rewards)
            columns |= {name: getattr(self, name) for name in ("transcript", "tool_calls", "tool_errors")}
        return columns
