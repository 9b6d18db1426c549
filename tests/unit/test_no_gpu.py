"""What a script puts on a GPU that is not there is put on the CPU, told once, and all is as before afterwards."""

import concurrent.futures
import contextlib
import io
import warnings

import pytest
import torch
import transformers

from failurelab.simulate.no_gpu import Mapped, on_this_machine

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where a GPU is, nothing is mapped")


def saved():
    file = io.BytesIO()
    torch.save({"x": torch.ones(2)}, file)
    file.seek(0)
    return file


def default(device):
    torch.set_default_device(device)
    return torch.nn.Linear(2, 2).weight if torch.get_default_device().type == "cpu" else None


def within(device, make):
    with device:
        return make()


PUT = {
    "tensor.to": lambda: torch.ones(2).to("cuda"),
    "tensor.to a number": lambda: torch.ones(2).to(0),
    "tensor.cuda": lambda: torch.ones(2).cuda(),
    "made there": lambda: torch.tensor([1.0, 2.0], device="cuda"),
    "a device's name": lambda: torch.ones(2, device=torch.device("cuda")),
    "a device's number": lambda: torch.ones(2, device=torch.device(0)),
    "like another": lambda: torch.zeros_like(torch.ones(2), device="cuda"),
    "module.to a number": lambda: torch.nn.Linear(2, 2).to(0).weight,
    "drawn by a generator": lambda: torch.rand(2, generator=torch.Generator("cuda")),
    "read from a file": lambda: torch.load(saved(), map_location="cuda:0")["x"],
    "read by a map": lambda: torch.load(saved(), map_location={"cpu": "cuda:0"})["x"],
    "by default": lambda: default("cuda"),
    "by default a number": lambda: default(torch.device(0)),
    "inside of a device": lambda: within(torch.device("cuda"), lambda: torch.nn.Linear(2, 2).weight),
    "inside of a device with a number": lambda: within(torch.device("cuda:0"), lambda: torch.empty(2)),
    "tensor.to mps": lambda: torch.ones(2).to("mps"),
    "made at xpu": lambda: torch.zeros(2, device="xpu:0"),
    "in another thread": lambda: concurrent.futures.ThreadPoolExecutor(1).submit(torch.ones, 2, device="cuda").result(),
}


@pytest.mark.parametrize("way", PUT)
def test_every_way_to_a_gpu_ends_on_the_cpu(way):
    """Without a GPU each is an error of torch."""
    mapped = Mapped()
    with on_this_machine(mapped):
        assert PUT[way]().device.type == "cpu" and PUT[way]().requires_grad in (True, False)
    (text,) = mapped.texts
    assert text.startswith(("device cuda", "device mps", "device xpu")) and text.endswith("-> cpu")
    with unset_default(), pytest.raises((RuntimeError, AssertionError)):
        PUT[way]()


@contextlib.contextmanager
def unset_default():
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("before", [None, "meta"])
def test_the_default_device_is_as_before_afterwards(before):
    """A script that leaves cuda as the default must not change what a later one, or a judge, makes."""
    with unset_default():
        torch.set_default_device(before)
        with on_this_machine(Mapped()):
            torch.set_default_device("cuda")
            assert torch.zeros(2).device.type == "cpu"
            with torch.device("meta"):
                assert torch.zeros(2).device.type == "meta"
        assert torch.zeros(2).device.type == (before or "cpu")
        with pytest.raises((RuntimeError, AssertionError)):
            within(torch.device("cuda"), lambda: torch.zeros(2))


def test_types_of_tensors_of_a_gpu():
    """`set_default_tensor_type` is how older scripts say that everything is made on the GPU."""
    with on_this_machine(Mapped()), warnings.catch_warnings(action="ignore"):
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        torch.set_default_tensor_type(torch.cuda.FloatTensor)
        types = (torch.cuda.HalfTensor, "torch.cuda.HalfTensor")
        assert all(torch.zeros(2).type(each).dtype == torch.float16 for each in types)
    with pytest.raises(RuntimeError):
        torch.zeros(2).type("torch.cuda.FloatTensor")


def test_a_file_that_was_saved_on_a_gpu(monkeypatch):
    """Its storages name the device; without a GPU torch refuses them."""
    file = saved()
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    torch.save({"x": torch.ones(2)}, file)
    file.seek(0)
    mapped = Mapped()
    with on_this_machine(mapped):
        assert torch.load(file)["x"].device.type == "cpu"
    assert mapped.texts == ["device cuda:0 -> cpu"]


@pytest.mark.parametrize("device", [0, "cuda:1"])
def test_a_pipeline_on_a_gpu(trained, device):
    """It is asked for a number, too, and its inputs follow."""
    model, tokenizer = trained
    with on_this_machine(Mapped()):
        generate = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device=device)
        assert generate("1+1=", max_new_tokens=2)[0]["generated_text"].startswith("1+1=")


def test_other_devices_are_left_alone_and_all_is_as_before_afterwards():
    own = torch.Generator()
    with on_this_machine(Mapped()), torch.device("cuda"):
        assert torch.zeros(2).device.type == "cpu"
        assert isinstance(own, torch.Generator) and isinstance(torch.Generator("cuda"), torch.Generator)
        assert torch.Generator("cuda").manual_seed(3).initial_seed() == 3
    assert isinstance(own, torch.Generator) and torch.Generator().device.type == "cpu"
    assert torch.zeros(2).device.type == "cpu" and torch.device("cuda").type == "cuda"
    mapped = Mapped()
    with on_this_machine(mapped):
        assert torch.ones(2, device="meta").to("meta").device.type == "meta"
        assert torch.ones(2).to("cpu", torch.float16).to(torch.float32, True).dtype == torch.float32
        assert mapped.device_map({"": "cpu"}) == {"": "cpu"} and mapped.device_map(None) is None
        assert Mapped().device_map({"": 0, "lm_head": "cpu"}) == {"": "cpu", "lm_head": "cpu"}
        assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
    assert mapped.texts == []


@pytest.mark.parametrize("asked", ["auto", 0, torch.device("cuda", 1)])
def test_a_device_map_of_a_gpu_is_the_cpu(asked):
    mapped = Mapped()
    assert [mapped.device_map(asked) for _ in range(2)] == ["cpu", "cpu"]
    assert mapped.texts == [f"device_map {asked} -> cpu"]


def test_what_a_gpu_is_asked_unguarded(monkeypatch):
    """Whether bfloat16 is supported is often asked by the capability; that there is none to ask is told."""
    mapped = Mapped()
    with on_this_machine(mapped):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_max_memory_allocated(0)
        torch.cuda.set_per_process_memory_fraction(0.9)
        torch.cuda.set_device("cuda:0")
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record(), ended.record(), ended.synchronize()
        assert began.elapsed_time(ended) >= 0
        with torch.cuda.device(0):
            assert torch.cuda.get_device_capability()[0] >= 8 and torch.cuda.current_device() == 0
        assert torch.cuda.get_device_properties(0).total_memory > 2**30
    assert [text.split("(")[0] for text in mapped.texts] == [
        "torch.cuda.get_device_capability",
        "torch.cuda.get_device_properties",
    ]
    with pytest.raises(AssertionError):
        torch.cuda.synchronize()
