"""Helpers compute where the model is: on a device that is not the CPU, simulated, a forgotten CPU tensor is an error.

"Expected all tensors to be on the same device" is what a GPU says where a helper made a tensor without asking the
model. A laptop never sees it. On a simulated device torch checks devices as on a real one; what reads values
(generation, verdicts) cannot run there, so for the rest the source is read.
"""

import ast
import pathlib

import pytest
from small import run_child

import failurelab

pytestmark = pytest.mark.slow

CHILD = """
import torch
from failurelab import gradients, logits
from failurelab import placement
from failurelab_course.experiments import models
from failurelab import simulate

simulate.devices(1)
net = simulate.place(simulate.model(models.path("tiny")), {"": 0}).train()
net.config.use_cache = False  # a cache makes a real tensor, which a simulation has not
net.config._attn_implementation = "eager"  # old transformers look into the mask before they call SDPA
ids = simulate.tokens(3, 12)
with simulate.fake():
    mask = torch.ones_like(ids)
    print(logits.keep_argument(net) in ("logits_to_keep", "num_logits_to_keep"))
    for chunk in (None, 2):
        scores = logits.completion_logps(net, ids, mask, 5, temperature=0.7, chunk_size=chunk)
        print(tuple(scores.shape), scores.device)
    scores.sum().backward()
print(all(each.grad.device == each.device == torch.device("sim", 0) for each in net.parameters()))
print(placement.check(net, "sim:0").elsewhere)
handle = gradients.require_input_grads(net)
with simulate.fake():
    net.get_input_embeddings().requires_grad_(False)
    print(net.get_input_embeddings()(ids).requires_grad)
handle.remove()
"""
# Where a tensor is made on the CPU on purpose: it is moved to the model afterwards, or belongs to a simulation.
MOVED_LATER = (
    "alignment._tokens logits._check_logits_are_the_heads log_probs._batch "
    # Rewards, advantages and weights of rows are kept on the CPU, and follow the logits in Step.part.
    "comparison._Comparer comparison.advantages_of_rounding definition.weighted_sum gradient.Step gradient._same "
    "gradient.advantages gradient.reward_table gradient.row_weights "
    "weights._of_rows weights.read_rows "
    # What an engine said of its tokens is kept on the CPU.
    "engines.logps_of turns.with_draws "
    # On the CPU for good: stand-ins of parameters, a made-up batch, toys and drawings.
    "toys.GoesOn toys.OneToken toys.Sampling toys.Toy "
    "rounding.number_line sequences.shares sequences.walks "
    # Of a mistake that is planted: it is never computed with, has no model, or follows what it is added to.
    "gradients.GradientWatch plants.no_graph"
)
FACTORIES = {"tensor", "zeros", "ones", "arange", "randint", "rand", "randn", "full", "empty", "linspace", "randperm"}


def made_without_a_device(path):
    """Yield `module.function` for each call of a factory of torch that names no device."""
    for outer in ast.parse(path.read_text(encoding="utf-8")).body:
        for node in ast.walk(outer):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "torch"
                and node.func.attr in FACTORIES
                and not any(keyword.arg == "device" for keyword in node.keywords)
            ):
                yield f"{path.stem}.{getattr(outer, 'name', '')}"


def test_no_helper_makes_a_tensor_without_asking_where(tmp_path):
    """Of what reads values, and so cannot be simulated. Next, for a new one: device=, or a place in the list above."""
    helpers = pathlib.Path(failurelab.__file__).parents[1]
    # A known gradient is a batch of literal numbers, and a library's loss is called with them on the CPU.
    elsewhere = ("failurelab/known_gradients", "failurelab/simulate")
    modules = (path for path in helpers.rglob("*.py") if not path.relative_to(helpers).as_posix().startswith(elsewhere))
    found = {name for path in modules for name in made_without_a_device(path)}
    assert found == set(MOVED_LATER.split())
    (tmp_path / "helper.py").write_text("import torch\ndef wrong(ids):\n    return ids + torch.ones(3)\n")
    assert list(made_without_a_device(tmp_path / "helper.py")) == ["helper.wrong"]  # the search is alive


def test_what_needs_no_values_runs_on_a_simulated_device():
    """In a child, for the simulation holds for the process."""
    assert run_child(CHILD).splitlines() == ["True", *["(3, 5) sim:0"] * 2, "True", "()", "True"]
