"""For every unit test: one thread, and the course's trained model in a copy of its own.

The models are tiny, and other work on the machine must not slow threads down.
"""

import copy
import gc
import os
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # for `small`


@pytest.fixture(autouse=True, scope="module")
def imports_are_not_collected():
    """A trainer collects when it begins to train, which takes a quarter of a second with all that was imported."""
    gc.collect()  # what the tests before left is not kept
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else accelerate chooses a number in the middle of a test
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def trained():
    """Return the course's model and tokenizer, which nobody changes."""
    from failurelab_course.experiments import models

    return models.load("tiny")


@pytest.fixture
def model(trained):
    return copy.deepcopy(trained[0])


@pytest.fixture
def tokenizer(trained):
    return trained[1]


@pytest.fixture(autouse=True)
def no_precision_is_left():
    """Old transformers write bf16=True of a config into the environment, where the next trainer reads it."""
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    yield
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)


@pytest.fixture(autouse=True)
def no_launcher_is_left():
    """With an engine in its own process trl writes a launcher's variables, and a later trainer would be its rank 0."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ.get(name) for name in names}
    yield
    if before != {name: os.environ.get(name) for name in names}:
        from accelerate.state import AcceleratorState

        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        AcceleratorState._reset_state(reset_partial_state=True)
