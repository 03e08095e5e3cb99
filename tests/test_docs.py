"""README.md and docs/walkthrough.md name only what is there: every name in backticks is a file, a function,
an option, a column, a metric or a value of this repository, or stands in OUTSIDE. So is every file and
option in a fenced block, and every link leads to a file.

Functions and options are then renamed in memory, one at a time, and each has to be missed: a check that
finds every name somewhere would be none.
"""
import ast
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", "docs/walkthrough.md"]
MODULES = sorted([*ROOT.glob("*.py"), *ROOT.glob("recipes/*.py")])
# In backticks, and not of this repository: examples, shell, SGLang's words.
OUTSIDE = {"--dry-run", ". .venv/bin/activate", "8 + 2 = 10", "file.py:function", "make", "torch_native",
           "make bench", "make train PYTHON=python3.11", "path/to/file.py:name", "prompt, response 1, response 2, ...",
           "reasoning_gym:<task>?option=value", "rollout.engine_args.enable_deterministic_inference=true",
           "rollout.engine_args.attention_backend=torch_native", "GLIBC_TUNABLES=", "rows.jsonl", "rows.parquet"}
DEFINITIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef


@functools.cache
def definitions(path, source):
    """How a module's functions, classes, methods and constants may be named: pack, workers.pack,
    workers.py:pack, and Worker.update, workers.py:Worker.update, update."""
    names, methods = set(), set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, DEFINITIONS):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, DEFINITIONS)}
    whole = names | methods
    within = {place + name for place in (f"{Path(path).stem}.", f"{path}:") for name in whole}
    return whole | within | {name.partition(".")[2] for name in methods}


def words(source):
    """What columns, metrics and values are named by: a module's strings, but for docstrings, also cut at
    slashes, and keywords of calls."""
    nodes = list(ast.walk(ast.parse(source)))
    documented = [node for node in nodes if isinstance(node, (ast.Module, *DEFINITIONS)) and node.body]
    docstrings = {id(node.body[0].value) for node in documented if isinstance(node.body[0], ast.Expr)}
    found = {node.arg for node in nodes if isinstance(node, ast.keyword)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found |= {node.value, *node.value.split("/")}
    return found


def options(tree, above=""):
    """The dotted keys of config.yaml, those of sections too."""
    for key, value in tree.items():
        yield above + key
        yield from options(value, f"{above}{key}.") if isinstance(value, dict) else ()


class Repository:
    """What there is to name. `sources` are the modules' texts by path, `keys` the options."""

    def __init__(self, sources=None, keys=None):
        self.sources = sources or {str(path.relative_to(ROOT)): path.read_text() for path in MODULES}
        self.keys = keys or set(options(yaml.safe_load((ROOT / "config.yaml").read_text())))
        self.defined = set().union(*(definitions(*module) for module in self.sources.items()))

    @functools.cached_property
    def words(self):
        found = set().union(*map(words, self.sources.values()))
        return found | {key.rpartition(".")[2] for key in self.keys}

    def has(self, name):
        key = re.sub(r"=\S+$", "", name)  # algorithm.advantage=rloo
        if name.startswith("python "):
            return all((ROOT / file).exists() for file in re.findall(r"[\w/]+\.(?:py|yaml)\b", name))
        if name.startswith("make "):
            return f"\n{name.removeprefix('make ')}:" in (ROOT / "Makefile").read_text()
        if name in self.defined or key in self.keys or (ROOT / name).exists():
            return True
        if "." in key and Path(key).suffix not in (".jsonl", ".html"):  # files of a run
            return False  # a function or an option: that its name is a string somewhere is not enough
        return all(part in self.words for part in key.split("/") if part and "<" not in part)


def names_in(text):
    """(names in backticks, files and options in fenced blocks, what links lead to)."""
    fence = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
    prose, blocks = fence.sub("", text), "\n".join(fence.findall(text))
    files = re.findall(r"[\w/]+\.(?:py|yaml)(?::\w[\w.]*)?", blocks)
    keys = re.findall(r"([a-z]\w*(?:\.\w+)+)=", blocks)
    return re.findall(r"`([^`]+)`", prose), [*files, *keys], re.findall(r"\]\(([^)]+)\)", prose)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_document_names_is_there(document):
    path, repository = ROOT / document, Repository()
    quoted, in_blocks, links = names_in(path.read_text(encoding="utf-8"))
    assert len(quoted) > 100
    assert [name for name in quoted if name not in OUTSIDE and not repository.has(name)] == []
    assert [name for name in in_blocks if not repository.has(name)] == []
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_a_renamed_function_or_option_is_missed():
    repository, functions, keys = Repository(), set(), set()
    for document in DOCUMENTS:
        quoted, in_blocks, _ = names_in((ROOT / document).read_text(encoding="utf-8"))
        dotted = {re.sub(r"=\S+$", "", name) for name in [*quoted, *in_blocks] if re.search("[.:]", name)}
        functions |= dotted & repository.defined
        keys |= dotted & repository.keys
    assert {"Trainer.train_step", "workers.pack", "workers.py:pack", "data.py:micro_batches"} <= functions
    assert {"rollout.n", "pools.main.devices_per_node", "actor.mini_batch_size"} <= keys
    for name in functions:
        last = re.split("[.:]", name)[-1]
        defined = rf"(?m)^( *(?:class|def|async def) |){last}\b(?=[(:]| = )"
        renamed = {path: re.sub(defined, r"\1renamed", text) for path, text in repository.sources.items()}
        assert not Repository(renamed, repository.keys).has(name), name
    for key in keys:
        assert not Repository(repository.sources, repository.keys - {key}).has(key), key


def test_the_figure_of_memory_shows_every_process_after_every_phase(tmp_path):
    steps = [{"step": 1, "time/sync": 1.0, "mem/sync/trainer0": 100.0, "mem/sync/engine_00": 200.0,
              "time/sleep": 0.25, "mem/sleep/trainer0": 100.0, "mem/sleep/engine_00": 50.0, "time/step": 2.0},
             {"step": 2, "time/save": 1.0, "mem/save/trainer0": 100.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))

    def draw(first, last):
        command = [sys.executable, ROOT / "bench/memory.py", tmp_path / "out.svg", tmp_path, first, last]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True)

    assert draw(1, 1).returncode == 0
    labels = set(re.findall(r">([^<>]+)</text>", (tmp_path / "out.svg").read_text()))
    assert {"sync, 1.00 s", "sleep, 0.25 s", "step 1", "trainer0", "engine_00", "memory held after it (MiB)",
            "phase, and the time it took"} <= labels
    refused = draw(1, 2)
    assert refused.returncode == 2 and "step 2 validated or saved" in refused.stderr
