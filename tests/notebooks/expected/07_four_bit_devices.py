"""Notebook 07: the early map says GPU 0; a config before it heals; today the model is asked to move, without a word."""

DIFFERENT = "on a different device than the one you're training on"


def check(result):
    found = result.figures(case="notebook 07")
    for name in ("as it was", "ddp_find_unused_parameters=False", 'fsdp=""'):
        assert DIFFERENT in found[name], name
    assert "`device_map='auto'` in any distributed mode" in found['device_map="auto"']
    for name in ("GRPOConfig first, the map unchanged", '{"": str(PartialState().device)}'):
        assert found[name] == "accepted", name
    assert found["maps"] == [0, 0]
    script, repaired = ([[gpu for _, gpu in trace] for trace in order] for order in found["traces"])
    assert script == [[0, 0, 0, 0], [0, 0, 0, 1]] and repaired == [[0] * 5, [0, 1, 1, 1, 1]]
    early_0, early_1, repaired_0, repaired_1 = (int(words.split()[0]) for words in found["elsewhere"])
    assert early_1 > 20 and early_0 == repaired_0 == repaired_1 == 0


# Wrong answers to the exercise: which tensors of a model are not on this rank's device.

HEAD = "def misplaced(model, device):\n"
ALL = "    tensors = [*model.named_parameters(), *model.named_buffers()]\n"
WRONG = [
    (HEAD + ALL + "    return [n for n, t in tensors if t.device.type != device.type]", "compare the number"),
    (HEAD + ALL + "    return [n for n, t in tensors] if tensors[0][1].device != device else []", "ask each"),
    (HEAD + "    return [n for n, p in model.named_parameters() if p.device != device]", "buffers, and no parameter"),
    (HEAD + ALL + "    return any(t.device != device for n, t in tensors)", "no such name"),
    (HEAD + ALL + "    return [n for n, t in tensors if t.device != str(device)]", "has no such name"),
    (HEAD + "    return [] if model.device == device else ['']", "it raised AttributeError"),
    (HEAD + "    return [n for n, t in model.state_dict().items() if t.device == device]", "has no such name"),
    (
        HEAD + "    return [n for n, t in model.state_dict().items() if t.device != device]",
        "not saved is in no `state_dict`",
    ),
    (HEAD + ALL + "    return [n for n, t in tensors if t.is_cuda and t.device != device]", "left on the CPU"),
    (
        HEAD
        + ALL
        + "    return [n for n, t in tensors if t.device.type == device.type and t.device.index != device.index]",
        "left on the CPU",
    ),
    (HEAD + ALL + "    return [n for n, t in tensors if t.device.index not in (None, 1)]", "left on the CPU"),
    (
        HEAD + "    tensors = [*model.named_buffers(), *model.named_parameters()]\n"
        "    return [n for n, t in tensors if t.device != device]",
        "parameters first, then buffers",
    ),
]

# The diff: with it each rank's map names its own device, also where each process sees one GPU alone. The script
# has its own adapters. No machine of the tests has two GPUs.

BEFORE = """
import contextlib
from failurelab_course.experiments import rank

node = contextlib.ExitStack()
node.enter_context(rank.of_a_node(1))
"""
RAISES = r"ValueError: You can't train a model that has been loaded in 8-bit or 4-bit precision on a different device"
LORA = None
MEASURE = """
def place(trained):
    return trained.accepted and str(trained.model.get_base_model().hf_device_map[""])

metrics = {"rank 1 of two": place(trainer)}
node.close()
for number, gpus in ((0, 2), (1, 1)):
    with rank.of_a_node(number, gpus=gpus):
        metrics[f"rank {number}, {gpus} visible"] = place(train())
healed = list(metrics.values()) == ["cuda:1", "cuda:0", "cuda:0"]
"""
