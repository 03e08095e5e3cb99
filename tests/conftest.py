"""What `make test` needs to run the files in two processes."""

import os

LONGEST = "test_resume.py", "test_train.py", "test_methods.py", "test_rollout.py"


def pytest_configure(config):
    """Each of several pytest processes has a core of its own, and so has all that it starts; far apart, as
    neighbours may be two threads of one core, and also one that xdist starts for a dead one. Otherwise two
    engines and two trainers, with a thread for every core each, would wait for each other at every product. A
    file that is run alone has all cores."""
    if hasattr(config, "workerinput"):
        cores = sorted(os.sched_getaffinity(0))
        count = config.workerinput["workercount"]
        number = int(config.workerinput["workerid"].removeprefix("gw")) % count
        os.sched_setaffinity(0, {cores[number * len(cores) // count]})


def pytest_collection_modifyitems(items):
    """The files that take longest go first, so that no core is idle at the end."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
