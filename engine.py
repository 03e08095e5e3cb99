"""How the SGLang engine starts: its arguments, its processes, and what ties them to the trainer.

A reader of the training step needs none of it; rollout.py does. On CPU, sglang_cpu.py is applied.
"""

import ctypes
import importlib.util
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import psutil


def free_address():
    """address:port of a free port of this machine."""
    import ray  # which reads its environment when it is imported: train_ppo.run sets that first

    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


def device_name(index, visible):
    """The machine's name for this process's GPU `index`, given its CUDA_VISIBLE_DEVICES, or None. Ray lets
    every worker see one GPU only, as its number 0, but an engine may span the GPUs of several workers."""
    return visible.split(",")[index] if visible else str(index)


def engine_arguments(config, model_path, device, hosts=("",), node=0):
    """SGLang's arguments for this run; `rollout.engine_args` has the last word. `hosts`: an address:port on
    each of the engine's machines, of which this one is number `node`."""
    rollout, longest = config.rollout, config.data.max_prompt_length + config.rollout.max_response_length
    arguments = {
        "model_path": model_path,
        "trust_remote_code": config.model.trust_remote_code,
        "device": device,
        "dtype": rollout.dtype,
        "tp_size": rollout.tp,
        "load_format": "dummy",  # a sync always comes first, so weights from disk would be read for nothing
        "context_length": longest + 8,  # SGLang keeps some for itself and would cut the longest responses
        "random_seed": config.seed % 2**32,  # numpy's, which takes no larger one; requests have their own
        "skip_tokenizer_init": True,
        "sleep_on_idle": True,  # or an idle scheduler holds a core of the trainer
    }
    if device != "cpu":
        arguments |= {"mem_fraction_static": rollout.mem_fraction, "enable_memory_saver": rollout.release}
    if len(hosts) > 1:
        arguments |= {"nnodes": len(hosts), "node_rank": node, "dist_init_addr": hosts[0]}
    if rollout.kv_tokens is not None:
        arguments["max_total_tokens"] = rollout.kv_tokens
    return arguments | rollout.engine_args


def check_architectures(names):
    """Raises ValueError if SGLang has none of these classes and would use transformers', as it can on a GPU
    only. To ask its registry would import all of its models, so their files are read."""
    models = Path(importlib.util.find_spec("sglang").origin).parent / "srt/models"
    classes = "".join(file.read_text(encoding="utf-8") for file in models.glob("*.py"))
    if not any(f"\nclass {name}(" in classes for name in names):
        raise ValueError(f"SGLang cannot run {', '.join(names)} without a GPU")


def start_engine(arguments, devices):
    """SGLang's Engine on `devices` of this machine, named as in CUDA_VISIBLE_DEVICES. Its schedulers end with
    this process. Blocks until it is ready, 25 to 35 s. Raises RuntimeError with what a scheduler died of."""
    with warnings.catch_warnings(action="ignore"):  # about kernels that this device does not have
        from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager

    managers = []

    class IdsEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)

        @staticmethod
        def init_tokenizer_manager_func(*args):
            managers.append(init_tokenizer_manager(*args))
            return managers[-1]

        @staticmethod
        def _launch_detokenizer_subprocesses(**_):
            return [], []  # there is no text, so it would only hold memory

    variables = {
        "PYTHONWARNINGS": "ignore",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for the few positions that are SGLang's own
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",
        "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0",  # an engine's other nodes serve without blocking us
    }
    if arguments["device"] == "cpu":
        import sglang_cpu

        arguments = sglang_cpu.ENGINE_ARGS | arguments
        variables |= sglang_cpu.environment(arguments["tp_size"])
    else:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    with tempfile.NamedTemporaryFile("r") as died_of:
        variables["SCHEDULER_DIED_OF"] = died_of.name
        try:
            with mock.patch.dict(os.environ, variables):  # the schedulers inherit them, we do not keep them
                engine = IdsEngine(**arguments)
        except Exception as error:
            for manager, _ in managers:  # its sockets, still open, would make its collection wait for ever
                manager.recv_from_detokenizer.context.destroy(linger=0)
            reason = died_of.read() or error
            raise RuntimeError(f"SGLang cannot run {arguments['model_path']}: {reason}") from error
    if engine.tokenizer_manager:  # its first node
        engine.tokenizer_manager._subprocess_watchdog.stop()  # it would kill this process; `_call` watches
    return engine


def die():
    """The end of a scheduler process by an exception, which `start_engine` reads; later nobody would."""
    error, died_of = sys.exception(), Path(os.environ["SCHEDULER_DIED_OF"])
    if died_of.exists():
        died_of.write_text(f"{type(error).__name__}: {error}")
    os._exit(1)


def run_scheduler(server_args, port_args, *args, **kwargs):
    """A scheduler process: SGLang's own, tied to the life of the trainer and to the loopback interface."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends us
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: when the parent dies, so do we
    if os.getppid() != multiprocessing.parent_process().pid:  # it died before we asked
        os._exit(1)
    # SGLang tells the trainer of an error by SIGQUIT, which kills it. Our death says as much, see `_call`.
    psutil.Process.send_signal = lambda process, signum: die()
    if server_args.nnodes == 1:
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        # torch's TCPStore listens on all interfaces. A file does not, and needs no free port.
        store = port_args.rpc_ipc_name.replace("ipc://", "file://") + "-store"
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = store
    if server_args.device == "cpu":
        import sglang_cpu

        sglang_cpu.patch()
    from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(server_args, port_args, *args, **kwargs)
