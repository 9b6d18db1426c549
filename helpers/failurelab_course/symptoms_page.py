"""The index by symptom, made from the registry: docs/symptoms.md, and docs/zh/symptoms.md in Chinese.

Who meets an error searches for its literal text: all of them stand on this page, so that a search finds it. Causes in
full and what was said in each thread stay in the registry's files, which each failure links. The Chinese page has the
same texts of errors, versions and links; its sentences stand in docs/zh/failures.toml.
"""

import pathlib
from collections.abc import Iterable

from failurelab import failures
from failurelab.errors import FailureLabError
from failurelab.failures import names
from failurelab.failures.toml_table import Table
from failurelab_course import eras
from failurelab_course.labs import verify as labs

FILES = "../helpers/failurelab/failures"
HEAD = """\
# Index by symptom

[中文](zh/symptoms.md)

Look up an error text or what you see. `failurelab symptoms train.log` looks a log up, `failurelab doctor --python PATH`
tells which failures your versions have, `failurelab preflight train.py` which your script has, and `failurelab diagnose
RUN` which a run has. Names such as `guards.GradientGuard` are in the package `failurelab` ([guards and
repairs](repairs.md)).

## Texts in a log

A star marks a text that has other causes too: there the check decides.
"""
CHINESE = "docs/zh/failures.toml"
CHINESE_HEAD = """\
# 按症状查找

[English](../symptoms.md)

按报错原文查：找到故障的编号、怎样在自己的训练里确认、怎样修复。本页由注册表生成（`failurelab symptoms --write`）。
`failurelab symptoms train.log` 查一份日志，`failurelab doctor --python PATH` 说明你的版本有哪些故障，
`failurelab preflight train.py` 检查脚本，`failurelab diagnose RUN` 检查一次训练。
`guards.GradientGuard` 这样的名字属于 `failurelab` 包（[guards 与修复](../repairs.md)，英文）。
“受影响”和“已修复”的每一行都有条件：条件不合，这些版本也没有问题。没有这两行的故障，版本和条件见英文页。
各版本里改掉的名字在[页末](#names)；网上常见的建议对不对，见[另一页](advice.md)；
preflight 的说明见[这里](preflight.md)。

## 日志里的报错原文

带星号的原文也有别的原因，要以“确认”一栏为准。
"""


CHINESE_NAMES = """\
## 各版本里去掉的名字

由 `tools/release_names.py` 从各版本的 wheel 里读出来。“版本”是有这个名字的第一个和最后一个版本（表从 trl 0.14.0 和
transformers 4.45.0 开始），最后一列是该版本自己的提示原文。把报错交给 `failurelab symptoms`，它会按这张表回答。

| 名字 | 属于 | 版本 | 当时的提示 |
| --- | --- | --- | --- |"""


class PageError(FailureLabError):
    """The Chinese texts do not fit the registry; the message says where."""


def page() -> str:
    """Return the index as Markdown: literal texts first, then what silent failures look like, then each failure."""
    known = failures.all()
    texts = _list_by_sign((f"`` {text} ``", text, each) for each in known for text in each.symptoms)
    signs = _list_by_sign((sign, sign, each) for each in known for sign in each.seen_as)
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
            ("受影响", _conditions(entry, "affected", failure.affected)),
            ("已修复", _conditions(entry, "fixed", failure.fixed)),
            ("阅读", _read(failure, "../", "notebook", "lab")),
            ("根因", _sources(failure, "../")),
        ]
        entry.done()
        sections += ["", *_layout(failure, failure.title_zh, breaks, rows)]
    table.done()
    lines += [f"- {sign} → {', '.join(links)}" for sign, links in seen.items()]
    return "\n".join([*lines, *sections, *_gone_names()]) + "\n"


def _conditions(entry: Table, key: str, stacks: tuple[failures.Stack, ...]) -> str:
    """Return each stack with its condition in Chinese; nothing where no conditions are written."""
    texts = entry.texts(key, ())
    if texts and len(texts) != len(stacks):
        raise entry.error(key, f"{len(texts)} texts for {len(stacks)} stacks of the registry")
    return "<br>".join(f"{stack}：{text}" for stack, text in zip(stacks, texts))


def _gone_names() -> list[str]:
    """Return the table of names that went: of the configurations, the trainers and the package."""
    rows = []
    for package, owners in (
        ("trl", ("GRPOConfig", "OnlineDPOConfig", "RLOOConfig", "OnlineDPOTrainer.__init__", "trl")),
        ("transformers", ("TrainingArguments", "Trainer.__init__")),
    ):
        for owner in owners:
            for name, (spans, *said) in names.table()[package]["names"].get(owner, {}).items():
                if not spans.endswith("-"):
                    rows.append(f"| `{name}` | {owner} | {package} {spans} | {' '.join(said)} |")
    return ["", '<a id="names"></a>', "", CHINESE_NAMES, *rows]


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
        ("Fixed", "<br>".join(f"{stack}: {stack.what}" for stack in failure.fixed)),
        ("Read", _read(failure, "", "notebook", "labs")),
        ("Cause", _sources(failure, "")),
    ]
    return _layout(failure, failure.title, failure.what_breaks.strip(), rows)


def _read(failure: failures.Failure, up: str, notebook: str, exercises: str) -> str:
    """Return links to the notebook and the labs of a failure; `up` leads to the folder docs."""
    found = [f"[{lab.number}]({up}../labs/{lab.name}/start.py)" for lab in labs.find() if failure.id in lab.failures]
    page = f"{notebook} [{failure.notebook[:2]}]({up}../notebooks/{failure.notebook}.ipynb)" if failure.notebook else ""
    return "; ".join(part for part in (page, f"{exercises} {', '.join(found)}" if found else "") if part)


def _sources(failure: failures.Failure, up: str) -> str:
    threads = ", ".join(f"[{thread.thread}]({thread.url})" for thread in failure.threads)
    return f"[{failure.id}.toml]({up}{FILES}/{failure.id}.toml); {threads}"


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
