"""The atlas as people see it, from evidence/atlas: the package's table, the heat map and docs/atlas.md.

    python benchmarks/atlas/summary.py

The table, `failurelab/failures/atlas.json`, has states alone; what was measured in a cell stands in evidence/atlas.
"""

import html
import json
import pathlib
import sys
from typing import Any

import columns
import measure

from failurelab import failures
from failurelab.failures import atlas

ROOT = measure.ROOT
PICTURE = ROOT / "evidence" / "atlas.svg"
PAGES = {"en": ROOT / "docs" / "atlas.md", "zh": ROOT / "docs" / "zh" / "atlas.md"}
COLOURS = {
    atlas.NONE: "#d9efe0",
    atlas.SILENT: "#c0392b",
    atlas.LOUD: "#f0a030",
    atlas.NOT_THERE: "#ffffff",
    atlas.NOT_MEASURED: "#d5d8dc",
    atlas.COULD_NOT_RUN: "#8e959c",
}


def find_places(records: list[dict[str, Any]]) -> dict[str, str]:
    """Return where each stack's evidence stands, below evidence/: its file, and its line as GitHub's links name it.

    Args:
        records: all that there are, in their order.
    """
    files: dict[pathlib.Path, list[str]] = {}
    for record in records:
        files.setdefault(columns.path(record["stack"], measure.OUT), []).append(record["stack"])
    return {
        stack: f"{path.relative_to(PICTURE.parent)}#L{line}"
        for path, stacks in files.items()
        for line, stack in enumerate(stacks, 1)
    }


def make_table(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the package has: rows, and of each stack its versions, its defaults and the state of each row."""
    probes = measure.read_probes()
    rows = [{"id": probe["id"], "what": probe["what"], "failures": probe["failure"]} for probe in probes]
    measured = []
    for record in records:
        if "probes" not in record:
            continue
        found = {probe["id"]: [probe["state"], probe.get("failure", "")] for probe in record["probes"]}
        states = [found.get(row["id"]) for row in rows]
        column = {"name": record["stack"], "versions": record["versions"], "day": record["until"]}
        measured.append(column | {"states": states, "defaults": record["defaults"]})
    return {"rows": rows, "columns": measured}


def write_table(table: dict[str, Any]) -> None:
    """Write it, a line a row and a column."""
    parts = []
    for name, entries in table.items():
        lines = ",\n".join(json.dumps(entry, ensure_ascii=False, separators=(",", ":")) for entry in entries)
        parts.append(f'"{name}": [\n{lines}\n]')
    atlas.FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


WARNING = "F1 which passes warn"  # a row of figures, and of no failure
CELL, LEFT, TOP = 9, 430, 52  # pixels: of a cell, beside all and above all of them


def draw(rows: list[atlas.Setup], records: list[dict[str, Any]]) -> str:
    """Return the heat map as SVG: releases of trl from left to right, set-ups from top to bottom.

    Where it is opened by itself, a column leads to its evidence, and a cell with a failure tells what was measured.
    """
    shown, places = _of_trl(records), find_places(records)
    width, height = LEFT + CELL * len(shown) + 10, TOP + CELL * len(rows) + 30
    colours = "".join(f".c{number}{{fill:{colour}}}" for number, colour in enumerate(COLOURS.values()))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="8">',
        f"<style>rect{{stroke:#b0b0b0;stroke-width:.4}}{colours}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for y, row in enumerate(rows):
        lines.append(f'<text x="{LEFT - 4}" y="{TOP + CELL * y + 7}" text-anchor="end">{html.escape(row.id)}</text>')
    states = list(COLOURS)
    for x, record in enumerate(shown):
        release, at = record["pinned"]["trl"], LEFT + CELL * x
        lines.append(f'<text transform="translate({at + 7} {TOP - 4}) rotate(-90)">{release}</text>')
        lines.append(f'<a href="{places[record["stack"]]}">')
        cells = {probe["id"]: probe for probe in record["probes"]}
        for y, row in enumerate(rows):
            cell = cells.get(row.id, {"state": atlas.NOT_MEASURED})
            place = f'class="c{states.index(cell["state"])}" x="{at}" y="{TOP + CELL * y}"'
            told, said = "", f"trl {release}, {row.id}: {cell.get('said', '')[:80]}"
            if cell["state"] in _FOUND:
                told = f"<title>{html.escape(said)}</title>"
            lines.append(f'<rect {place} width="{CELL}" height="{CELL}">{told}</rect>')
        lines.append("</a>")
    for number, state in enumerate(states):
        at, below = LEFT + 80 * number, height - 18
        lines.append(f'<rect class="c{number}" x="{at}" y="{below}" width="9" height="9"/>')
        lines.append(f'<text x="{at + 13}" y="{below + 8}">{state}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


HEAD = """# The atlas: each failure in each release

[中文](zh/atlas.md)

What people could install on the day of a release of trl (its wheel, and the newest transformers, peft, accelerate and
datasets of three days later, with torch as in all eras), and one small training for each row, judged by
[preflight](preflight.md). Nothing here is read in source texts. `failurelab upgrade 0.19.1 1.16.0` tells what another
release changes, defaults too; `make atlas` measures what is not there yet.

![Releases of trl from left to right, set-ups from top to bottom: no failure, silent, loud](../evidence/atlas.svg)

*Silent*: training goes on, and is wrong. *Loud*: it ends in an error. *Not there*: the release has no such trainer or
option, or refuses the set-up. *Not measured*: preflight could not tell, for the reason that stands in the evidence. A
row of steps beside their definition is silent where the gradient is not the algorithm's. Opened by itself, the picture
tells what was measured in a cell with a failure, and leads to its evidence, a line a release:
`grep trl-0.19.1 evidence/atlas/trl.jsonl | python -m json.tool` lays one out. A test holds the
[registry](symptoms.md) to these cells.

`OnlineDPOTrainer` is that of `trl.experimental` where there is one, as from 0.26 on. Under ZeRO-3 one process trains on
a CPU, and DeepSpeed is that of the day. A tool is called by a stand-in for the model's generation. Not in the atlas:
what needs a GPU or several (F5, F6), vLLM (F17, and F16 under `use_vllm`), or a person's own prompts and rewards (F10,
F12, F14).
"""
HEAD_ZH = """# 图谱：每个版本里的每个故障

[English](../atlas.md)

对 trl 的每个版本，装上它发布当天（加三天）能装到的 transformers、peft、accelerate 和 datasets，
每一行跑一次小训练，由 [preflight](preflight.md) 判断，没有一条是读源码读来的。
`failurelab upgrade 0.19.1 1.16.0` 说出换版本会变什么，默认值也算；`make atlas` 补测还没有的版本。

![从左到右是 trl 的版本，从上到下是各种设置：无故障、静默、报错](../../evidence/atlas.svg)

*silent（静默）*：训练照常进行，结果是错的。*loud（报错）*：训练以报错结束。
*not there（没有）*：这个版本没有这个 trainer 或选项，或拒绝这样设置。
*not measured（没测出）*：preflight 判断不了，原因写在证据里。
单独打开图片，鼠标停在有故障的格子上会显示测到了什么，点击进入证据，每个版本占一行：
`grep trl-0.19.1 evidence/atlas/trl.jsonl | python -m json.tool` 把一行展开来看。
"""
_WORDS = {
    "en": {
        "counted": "Cells",
        "left": " Not asked yet: {}, which `make atlas` measures.",
        "measured": "Releases of trl measured: {}, from {} to {}; of transformers: {}.",
        "install": "{} cannot be installed: {}",
        "cost": "One more release takes {} minutes (trl {}) and {} GB, which are given back; all {} stacks, two at a "
        "time on two cores that had other work too, {} hours.",
        "warning": 'Which passes print "None of the inputs have requires_grad"',
        "passes": "How often it is printed in three steps with `use_reentrant=True`: in generation, scoring and "
        "training passes. Healthy runs have it in the first two; in training passes tensors are without a gradient.",
        "warned": "| trl | full fine-tuning | frozen embeddings | `peft_config` |",
        "run": "could not run",
        "where": "Where it is found",
        "columns": "| failure, set-up | trl, with what was there on its day | transformers | changed by |",
    },
    "zh": {
        "counted": "格子数",
        "left": " 还没测的：{} 个，`make atlas` 会补上。",
        "measured": "测过的 trl 版本：{} 个，从 {} 到 {}；transformers：{} 个。",
        "install": "{} 装不上：{}",
        "cost": "多测一个版本要 {} 分钟（trl {}），占 {} GB，测完即释放；全部 {} 个环境，两个并行，"
        "在还有别的活要干的两个核上要 {} 小时。",
        "warning": '哪些前向会打印 "None of the inputs have requires_grad"',
        "passes": "`use_reentrant=True`，训练三步，依次是生成、打分、训练三种前向里打印的次数。"
        "前两种健康的训练也有；训练前向里有，就是有参数没拿到梯度。",
        "warned": "| trl | 全参微调 | 冻结 embedding | `peft_config` |",
        "run": "跑不了",
        "where": "在哪些版本里",
        "columns": "| 故障与设置 | trl（配当天能装到的其他库） | transformers | 由谁改变 |",
    },
}


def make_page(rows: list[atlas.Setup], records: list[dict[str, Any]], language: str = "en") -> str:
    """Return the text of docs/atlas.md: the picture, what was counted, and in which releases each row was found.

    Each release that is named leads to its evidence.
    """
    say, up = _WORDS[language], "../" * (1 + (language == "zh"))
    links = {stack: f"{up}evidence/{place}" for stack, place in find_places(records).items()}
    measured, others = _of_trl(records), [each for each in records if "probes" in each and each not in _of_trl(records)]
    cells = [probe["state"] for record in records for probe in record.get("probes", ())]
    counts = ", ".join(f"{cells.count(state)} {state}" for state in COLOURS)
    asked = len(measured) * len(rows) + len(others) * sum(not probe.get("only_trl") for probe in measure.read_probes())
    left = say["left"].format(asked - len(cells)) if asked > len(cells) else ""
    lines = [HEAD if language == "en" else HEAD_ZH, f"{say['counted']}: {counts}.{left}\n"]
    ends = [record["pinned"]["trl"] for record in (measured[0], measured[-1])]
    lines.append(say["measured"].format(len(measured), *ends, len(others)) + "\n")
    for record in records:
        if "probes" not in record:
            lines.append("- " + say["install"].format(record["stack"], record["could_not_be_installed"][:200]))
    lines += _errors(records, say["run"])
    lines.append("\n" + _cost(records, say["cost"]))
    lines += [f"\n## {say['where']}\n", say["columns"], "| --- | --- | --- | --- |"]
    for row in rows:
        spans = [
            _spans(row.id, shown, package, links) for shown, package in ((measured, "trl"), (others, "transformers"))
        ]
        if any(spans):
            lines.append(f"| {row.what} | {spans[0]} | {spans[1]} | {_threads(row, records)} |")
    lines += [f"\n## {say['warning']}\n", f"{say['passes']}\n", say["warned"], "| --- | --- | --- | --- |"]
    lines += _warned(measured)
    return "\n".join(lines) + "\n"


_FOUND = (atlas.LOUD, atlas.SILENT)


def _of_trl(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["stack"].startswith("trl-") and "probes" in record]


def _errors(records: list[dict[str, Any]], title: str) -> list[str]:
    """Return a line for each error that kept probes from running, with the stacks."""
    stacks: dict[str, list[str]] = {}
    for record in records:
        for probe in record.get("probes", ()):
            if probe["state"] == atlas.COULD_NOT_RUN:
                error = probe["said"].rpartition(" ended in ")[2][:160]
                stacks.setdefault(error, []).append(record["stack"])
    return [
        f"- {title}: {', '.join(dict.fromkeys(names))} ({len(names)}): `{error}`" for error, names in stacks.items()
    ]


def _cost(records: list[dict[str, Any]], text: str) -> str:
    """Return what a release more costs, and all stacks, by what each took when it was measured, in parts or at once."""
    made = [record for record in records if "probes" in record]
    newest = [record for record in made if record["stack"].startswith("trl-")][-1]
    size = max(record.get("megabytes", 0) for record in made) / 1000
    hours = sum(record["seconds"] for record in made) / 2 / 3600
    return text.format(
        round(newest["seconds"] / 60), newest["pinned"]["trl"], round(size, 1), len(made), round(hours, 1)
    )


def _warned(records: list[dict[str, Any]]) -> list[str]:
    """Return a row for the releases that follow each other and print the warning as often in the same passes."""
    rows: list[list[str]] = []
    for record in records:
        said = [probe["said"] for probe in record["probes"] if probe["id"] == WARNING and probe["state"] == atlas.NONE]
        release = record["pinned"]["trl"]
        if said and rows and rows[-1][2] == said[0]:
            rows[-1][1] = release
        elif said:
            rows.append([release, release, said[0]])
    return [
        f"| {first if first == last else f'{first} to {last}'} | {' | '.join(said.split(', '))} |"
        for first, last, said in rows
    ]


def _threads(row: atlas.Setup, records: list[dict[str, Any]]) -> str:
    """Return the threads upstream by which the failures that a row showed were mended, as the registry has them."""
    shown = {
        probe["failure"]
        for record in records
        for probe in record.get("probes", ())
        if probe["id"] == row.id and probe["state"] in _FOUND
    }
    stacks = [stack for failure in failures.all() if failure.id in shown for stack in failure.fixed if stack.thread]
    links = {stack.thread: failures.Thread(stack.thread, "").url for stack in stacks}
    return ", ".join(f"[{thread}]({url})" for thread, url in links.items())


def _spans(row: str, records: list[dict[str, Any]], package: str, links: dict[str, str]) -> str:
    """Return the releases in which a row was found: those that follow each other as `first to last`, with links."""
    spans: list[list[str]] = []
    before = False
    for record in records:
        there = any(probe["id"] == row and probe["state"] in _FOUND for probe in record["probes"])
        link = f"[{record['pinned'][package]}]({links[record['stack']]})"
        if there and before:
            spans[-1][1] = link
        elif there:
            spans.append([link, link])
        before = there
    return ", ".join(first if first == last else f"{first} to {last}" for first, last in spans)


def main() -> int:
    """Write the table, the picture and the page."""
    records = columns.read(measure.OUT)
    write_table(make_table(records))
    atlas.read.cache_clear()
    rows, _ = atlas.read()
    PICTURE.write_text(draw(rows, records), encoding="utf-8")
    for language, page in PAGES.items():
        page.write_text(make_page(rows, records, language), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
