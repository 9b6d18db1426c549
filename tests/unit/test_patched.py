"""Functions that a script put in place of a library's are found; what one library does to another is left alone."""

import torch.utils.checkpoint

from failurelab_course.labs.checker import patched


def test_nothing_replaced_is_nothing_found():
    assert patched.replaced(patched.snapshot()) == []


def test_a_function_or_method_of_the_script_s_own_is_found(monkeypatch):
    """A module's function, and a method of a class, by their full names; a name that is gone is found too."""
    before = patched.snapshot()
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda function, *args, **_: function(*args))
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, value: value)
    monkeypatch.delattr(torch.nn.functional, "linear")
    assert patched.replaced(before) == [
        "torch.nn.functional.linear",
        "torch.nn.modules.linear.Linear.forward",
        "torch.utils.checkpoint.checkpoint",
    ]


def test_another_function_of_the_same_library_is_found(monkeypatch):
    before = patched.snapshot()
    monkeypatch.setattr(torch.nn.functional, "softmax", torch.nn.functional.relu)
    assert patched.replaced(before) == ["torch.nn.functional.softmax"]


def test_what_one_library_does_to_another_is_left_alone(monkeypatch):
    """DeepSpeed and accelerate replace functions of torch as they work."""

    def replacement(self, value):
        return value

    replacement.__module__ = "deepspeed.runtime.zero"
    before = patched.snapshot()
    monkeypatch.setattr(torch.nn.Linear, "forward", replacement)
    assert patched.replaced(before) == []
