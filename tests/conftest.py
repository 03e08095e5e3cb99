"""With several pytest processes (`make test`) each has a core of its own, and so has all that it starts.

Otherwise two engines and two trainers, each with a thread for every core, would wait for each other at every
product. A file that is run alone has all cores.
"""
import os


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        cores = sorted(os.sched_getaffinity(0))
        number = int(config.workerinput["workerid"].removeprefix("gw"))
        os.sched_setaffinity(0, {cores[number % len(cores)]})
