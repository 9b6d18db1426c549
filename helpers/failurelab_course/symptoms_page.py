"""The index by symptom, made from the registry: docs/symptoms.md, and docs/zh/symptoms.md in Chinese.

Who meets an error searches for its literal text: all of them stand on this page, so that a search finds it. Causes in
full and the threads stay in the registry's files, which each failure links. The Chinese page has the same texts of
errors, versions and links; its sentences stand in docs/zh/failures.toml.
"""

import pathlib
from collections.abc import Iterable

from failurelab import failures
from failurelab.errors import FailureLabError
from failurelab.failures.toml_table import Table
from failurelab_course import eras

FILES = "../helpers/failurelab/failures"
HEAD = """\
# Index by symptom

[中文](zh/symptoms.md)

For whoever has an error text, or a run that looks wrong.
`failurelab symptoms train.log` looks a log up; `failurelab doctor --python PATH` tells which failures your versions
have; `failurelab preflight train.py` measures most of them in your script ([how](preflight.md)). `guards` and the like
are modules of `failurelab` ([repairs](repairs.md)). The file under *Cause* has the threads upstream.

## Texts in a log

A star marks a text that has other causes too: there the check decides.
"""
CHINESE = "docs/zh/failures.toml"
CHINESE_HEAD = """\
# 按症状查找

[English](../symptoms.md)

写给手上有一段报错或一次异常训练的人：找到故障的编号，确认，修复。本页由注册表生成（`failurelab symptoms --write`）。
`failurelab symptoms train.log` 查一份日志，也查各版本里改掉的名字；
`failurelab doctor --python PATH` 说明你的版本有哪些故障。
`guards.GradientGuard` 这样的名字属于 `failurelab` 包（[guards 与修复](../repairs.md)，英文）。
“受影响”的每一行都有条件：条件不合，这些版本也没有问题。没有这一行的故障，版本和条件见英文页。
网上常见的建议对不对，见[另一页](advice.md)。

## 日志里的报错原文

带星号的原文也有别的原因，要以“确认”一栏为准。
"""


class PageError(FailureLabError):
    """The Chinese texts do not fit the registry; the message says where."""


def page() -> str:
    """Return the index as Markdown: literal texts first, then what silent failures look like, then each failure."""
    known = failures.all()
    texts = _list_by_sign((f"`` {text} ``", text, each) for each in known for text in each.symptoms)
    # In their order as text, so that what is said of the reward, or of grad_norm, stands together.
    signs = sorted(_list_by_sign((sign, sign, each) for each in known for sign in each.seen_as))
    lines = [HEAD, *texts, "", "## What is seen where nothing is said", "", *signs]
    for failure in known:
        lines += ["", *_section(failure)]
    return "\n".join(lines) + "\n"


def chinese_page() -> str:
    """Return the index in Chinese: the same texts, ids, versions and links.

    Raises:
        PageError: a failure has no Chinese text, or a text has no failure.
    """
    known = failures.all()
    table = Table.read(pathlib.Path(eras.root() / CHINESE), PageError, CHINESE)
    texts = _list_by_sign((f"`` {text} ``", text, each) for each in known for text in each.symptoms)
    lines = [CHINESE_HEAD, *texts, "", "## 没有报错时看到的现象", ""]
    seen: dict[str, list[str]] = {}
    sections: list[str] = []
    for failure in known:
        entry = Table(table.file, table.take(failure.id, dict), PageError, f"{failure.id}: ")
        breaks, see, change = (entry.text(name) for name in ("breaks", "see", "change"))
        for sign in entry.texts("seen", ()):
            seen.setdefault(sign, []).append(f"[{failure.id}](#{_anchor(failure)})")
        rows = [
            ("确认", see),
            ("修改", change),
            ("受影响", _conditions(entry, failure.affected)),
            ("根因", _sources(failure, "../", "notebook")),
        ]
        entry.done()
        sections += ["", *_layout(failure, failure.title_zh, breaks, rows)]
    table.done()
    lines += [f"- {sign} → {', '.join(links)}" for sign, links in seen.items()]
    return "\n".join([*lines, *sections]) + "\n"


def _conditions(entry: Table, stacks: tuple[failures.Stack, ...]) -> str:
    """Return each stack with its condition in Chinese; nothing where no conditions are written."""
    texts = entry.texts("affected", ())
    if texts and len(texts) != len(stacks):
        raise entry.error("affected", f"{len(texts)} texts for {len(stacks)} stacks of the registry")
    return "<br>".join(f"{stack}：{text}" for stack, text in zip(stacks, texts))


def _list_by_sign(signs: Iterable[tuple[str, str, failures.Failure]]) -> list[str]:
    """Return a line for each sign (as it is shown, as the registry has it), with the links of all that have it."""
    found: dict[str, list[str]] = {}
    for shown, sign, failure in signs:
        found.setdefault(shown, []).append(f"[{failure.id}](#{_anchor(failure)}){'*' * (sign in failure.notices)}")
    return [f"- {shown} → {', '.join(links)}" for shown, links in found.items()]


def _section(failure: failures.Failure) -> list[str]:
    helper = failure.helper and failure.helper not in failure.check + failure.fix
    rows = [
        ("Check", failure.check),
        ("Repair", failure.fix + (f" (`failurelab.{failure.helper}`)" if helper else "")),
        ("Affected", "<br>".join(f"{stack}: {stack.what}" for stack in failure.affected)),
        ("Cause", _sources(failure, "", "notebook")),
    ]
    return _layout(failure, failure.title, failure.what_breaks.strip(), rows)


def _sources(failure: failures.Failure, up: str, notebook: str) -> str:
    """Return links to the notebook and to the registry's file; `up` leads to the folder docs."""
    page = [f"[{notebook} {failure.notebook[:2]}]({up}../notebooks/{failure.notebook}.ipynb)"] * bool(failure.notebook)
    return "; ".join([*page, f"[{failure.id}.toml]({up}{FILES}/{failure.id}.toml)"])


def _layout(failure: failures.Failure, title: str, breaks: str, rows: list[tuple[str, str]]) -> list[str]:
    return [
        f'<a id="{_anchor(failure)}"></a>',
        "",
        f"## {failure.id}: {title}",
        "",
        breaks,
        "",
        *(f"- **{name}**: {text}" for name, text in rows if text),
    ]


def _anchor(failure: failures.Failure) -> str:
    return failure.id.lower()
