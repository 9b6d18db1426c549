"""From a notebook to a deck: which cells become slides, and what of them.

The rules, in the order in which they are asked:

1. The first cell is the title slide: title, alert, what you will do, minutes. Set-up, what stands before the first
   heading, cells that only keep evidence, and cells that only define something are left out; the speaker notes name
   the definitions.
2. A heading of the second level begins a section; slides of a section lie below each other.
3. A paragraph with **Predict** ends its slide, as a question. What comes out of the cells after it, up to the next
   text, is the answer: it appears at a click. A cell that calls `predict.ask` is such a question, one that calls
   `predict.answer` such an answer.
4. Prose, code and outputs are cut to what can be read from the back row (`slide_text`); prose goes whole into the
   speaker notes. Code that draws a picture or lays out a table is left out, the picture and the table are not. A
   picture has a slide to itself. A table that is too long goes on, on the next slide.
5. The last slides ask the discussion questions of the teacher's guide; the notes say what a good answer holds.

The notebooks stay as they are: nothing in them is about slides.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

import nbformat

from failurelab_course.notebook import predictions
from failurelab_course.runs import stored
from failurelab_course.teaching import slide_text

_PREDICT = "**Predict"


@dataclasses.dataclass
class Slide:
    """One slide.

    Attributes:
        title: its heading.
        section: whether it begins a section.
        parts: cells, each with whether it is an answer, which appears at a click.
        notes: paragraphs for the speaker, markdown.
        heights: of the parts, in pixels.
    """

    title: str
    section: bool
    parts: list[tuple[Any, bool]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    heights: list[int] = dataclasses.field(default_factory=list)

    @property
    def height(self) -> int:
        """Of all parts together, in pixels."""
        return sum(self.heights)


class Deck:
    """Slides as they are filled: what does not fit any more goes to the next one, under the same heading."""

    def __init__(self):
        self.slides: list[Slide] = []

    def section(self, title: str) -> None:
        """Begin a section."""
        self.slides.append(Slide(title, True))

    def turn(self) -> None:
        """Begin the next slide of the section, if anything is on this one; what announces goes there too."""
        last = self.slides[-1]
        if not last.parts:
            return
        self.slides.append(Slide(last.title, False))
        if len(last.parts) > 1 and _announces(last.parts[-1][0]) and last.heights[-1] <= slide_text.LINE_ABOVE:
            self.slides[-1].parts.append(last.parts.pop())
            self.slides[-1].heights.append(last.heights.pop())

    def add(self, cell: Any, height: int, answer: bool = False) -> None:
        """Put a cell on this slide, or on the next if it does not fit here."""
        if self.slides[-1].height + height > slide_text.ROOM:
            self.turn()
        self.slides[-1].parts.append((cell, answer))
        self.slides[-1].heights.append(height)

    def note(self, text: str) -> None:
        """Keep a paragraph for the speaker."""
        self.slides[-1].notes.append(text)


def _announces(cell: Any) -> bool:
    return cell.cell_type == "markdown" and cell.source.rstrip("* ").endswith(":")


def card(markdown: str) -> dict[str, str]:
    """Return the card at a notebook's head: its rows by name, `title`, and `alert`, the quotation."""
    title = re.search(r"^# (.+)$", markdown, re.MULTILINE)
    alert = "\n".join(line for line in markdown.splitlines() if line.startswith(">"))
    rows = dict(re.findall(r"^\| \*\*(.+?)\*\* \| (.*) \|$", markdown, re.MULTILINE))
    return {"title": title[1] if title else "", "alert": alert, **rows}


def slides(notebook: Any, questions: Sequence[tuple[str, str]] = ()) -> list[Slide]:
    """Return a notebook's slides.

    Args:
        notebook: as nbformat reads it, with stored outputs.
        questions: for the last slides, `(question, what a good answer holds)`.
    """
    deck, begun, asked = Deck(), False, False
    _title(deck, card(notebook.cells[0].source))
    for cell in notebook.cells[1:]:
        if cell.cell_type == "markdown":
            begun = begun or any(kind == "heading" for kind, _ in slide_text.blocks(cell.source))
            if begun:
                asked = _markdown(deck, cell.source)
        elif cell.cell_type == "code" and begun and "parameters" not in stored.tags(cell):
            asked = _code(deck, cell, asked)
    if questions:
        _discussion(deck, questions)
    return [slide for slide in deck.slides if slide.parts]


def notebook_of(found: Iterable[Slide]) -> Any:
    """Return slides as a notebook whose cells carry nbconvert's slide types."""
    made = nbformat.v4.new_notebook(metadata={"language_info": {"name": "python"}})
    for place, slide in enumerate(found):
        head = f"{'##' if place else '#'} {slide.title}"
        cells = [(nbformat.v4.new_markdown_cell(head), "slide" if slide.section else "subslide")]
        if slide.notes:
            cells.append((nbformat.v4.new_markdown_cell("\n\n".join(slide.notes)), "notes"))
        # What follows an answer on its slide appears with it.
        cells += [(cell, "fragment" if answer else "-") for cell, answer in slide.parts]
        for cell, kind in cells:
            cell.metadata["slideshow"] = {"slide_type": kind}
            made.cells.append(cell)
    return made


def _markdown_cell(text: str, *tags: str) -> Any:
    return nbformat.v4.new_markdown_cell(slide_text.unlinked(text), metadata={"tags": list(tags)} if tags else {})


def _title(deck: Deck, told: dict[str, str]) -> None:
    deck.section(told["title"])
    deck.slides[0].parts.append((_markdown_cell(told["alert"], "alert"), False))
    deck.slides[0].parts.append((_markdown_cell(f"**You will** {told.get('You will', '')}", "goal"), False))
    facts = [f"**{name}** {told[name]}" for name in ("Minutes", "Difficulty", "Eras") if name in told]
    deck.slides[0].parts.append((_markdown_cell(" · ".join(facts), "facts"), False))
    for name in ("What breaks", "Hardware", "Upstream threads"):
        if name in told:
            deck.note(f"**{name}**: {told[name]}")


def _markdown(deck: Deck, source: str) -> bool:
    """Put a text on slides; return whether its last words ask for a prediction."""
    asked = False
    for kind, text in slide_text.blocks(source):
        if kind == "heading":
            deck.section(text.lstrip("# "))
        elif kind == "details":
            deck.note(re.sub(r"</?(details|summary)>", "", text).strip())
        elif kind == "table":
            _markdown_table(deck, text)
        elif kind == "list":
            _list(deck, text)
        elif kind == "fence":
            lines = text.splitlines()[1:-1][: slide_text.CODE_LINES]
            deck.add(nbformat.v4.new_code_cell("\n".join(lines)), len(lines) * slide_text.CODE_LINE + 40)
        else:
            asked = _PREDICT in text
            _prose(deck, text, asked)
    return asked


def _prose(deck: Deck, text: str, asked: bool) -> None:
    # A question is shown whole, and so is what the alert says.
    shown = text if asked or text.startswith(">") else slide_text.cut(text)
    deck.add(_markdown_cell(shown, *["question"] * asked), slide_text.prose_height(shown) + 40 * asked)
    if shown.split() != text.split():
        deck.note(slide_text.unlinked(text))
    if asked:
        deck.turn()


def _list(deck: Deck, text: str) -> None:
    """Put a list on slides; one that is cut goes whole into the notes."""
    items = slide_text.items(text)
    shown = [slide_text.cut(item) for item in items]
    if shown != items:
        deck.note("\n".join(items))
    for item in shown:
        # Each item is a cell of its own, so that a list may go on, on the next slide, with its number.
        deck.add(_markdown_cell(item, "item"), slide_text.prose_height(item))


def _markdown_table(deck: Deck, text: str) -> None:
    lines = text.splitlines()
    rows = [[each.strip() for each in re.split(r"(?<!\\)\|", line.strip().strip("|"))] for line in lines]
    rows = [[slide_text.unlinked(each) for each in row] for row in rows]
    body = rows[2:]
    wide = slide_text.width([rows[0], *body])
    heights = [slide_text.row_height(row, wide) for row in body]
    tags = ["crowded"] * slide_text.crowded([rows[0], *body])

    def part(first: int, last: int) -> Any:
        return _markdown_cell("\n".join([*lines[:2], *lines[2:][first:last]]), *tags)

    _rows(deck, heights, part, False)


def _rows(deck: Deck, heights: list[int], part: Any, answer: bool) -> None:
    """Put a table on as many slides as its rows take; `part(first, last)` makes the cell with these rows."""
    if deck.slides[-1].height + slide_text.ROW + sum(heights) > slide_text.ROOM:
        deck.turn()
    for first, last in slide_text.split_rows(heights, slide_text.ROOM):
        deck.add(part(first, last), slide_text.ROW + sum(heights[first:last]), answer)


def _code(deck: Deck, cell: Any, asked: bool) -> bool:
    """Put a code cell and what came of it on slides; return whether what follows is still an answer."""
    if "notebook.setup(" in cell.source:
        return asked
    code = slide_text.Code(cell.source)
    asks, answers = "predict.ask(" in cell.source, "predict.answer(" in cell.source
    outputs = [each for each in cell.outputs if each.output_type in ("stream", "display_data", "execute_result")]
    drawn = any("image/png" in each.get("data", {}) or "text/html" in each.get("data", {}) for each in outputs)
    if code.defines and not outputs:
        deck.note(f"Defined in the notebook: {', '.join(f'`{name}`' for name in code.defines)}.")
    hidden = drawn or asks or answers or code.lays_out
    if code.text and not hidden and (outputs or code.calls):
        lines = code.text.count("\n") + 1
        height = lines * slide_text.CODE_LINE + 40
        # A short output stays on the page of its code.
        expected = sum(_height(each) for each in outputs)
        if deck.slides[-1].height + height + expected > slide_text.ROOM >= height + expected:
            deck.turn()
        deck.add(nbformat.v4.new_code_cell(code.text), height)
    if asks:
        _questions(deck, cell.source)
        return True
    for output in outputs:
        _output(deck, output, asked or answers)
    return asked


def _questions(deck: Deck, source: str) -> None:
    """Put what `predict.ask` asks on slides of its own, as the cell has it: buttons are for a notebook."""
    for question in predictions.asked(source):
        choices = "\n".join(f"- {choice}" for choice in question.choices)
        height = slide_text.prose_height(question.text) + slide_text.PROSE_LINE * len(question.choices) + 60
        deck.add(_markdown_cell(f"{question.text}\n\n{choices}", "question"), height)
        deck.turn()


def _height(output: Any) -> int:
    data = output.get("data", {})
    if "image/png" in data:
        return slide_text.ROOM
    text = output.text if output.output_type == "stream" else data.get("text/plain", "")
    if "text/html" in data:
        return slide_text.ROW * len(text.splitlines())
    return len(slide_text.wrapped(text)) * slide_text.TEXT_LINE + 40


def _output(deck: Deck, output: Any, answer: bool) -> None:
    data = output.get("data", {})
    if "image/png" in data:
        shares = len(deck.slides[-1].parts) == 1 and _announces(deck.slides[-1].parts[0][0])
        if not (shares and deck.slides[-1].height <= slide_text.LINE_ABOVE):
            deck.turn()
        above = deck.slides[-1].height
        deck.add(_output_cell([output], *["below"] * bool(above)), slide_text.ROOM - above, answer)
    elif "<tbody>" in data.get("text/html", ""):
        _html_table(deck, output, answer)
    else:
        text = output.text if output.output_type == "stream" else data.get("text/plain", "")
        lines = slide_text.wrapped(text)
        made = nbformat.v4.new_output("stream", name="stdout", text="\n".join(lines))
        deck.add(_output_cell([made]), len(lines) * slide_text.TEXT_LINE + 40, answer)


def _html_table(deck: Deck, output: Any, answer: bool) -> None:
    head, body, foot = re.split(r"(?<=<tbody>)|(?=</tbody>)", output.data["text/html"], maxsplit=2)
    rows = re.findall(r"<tr>.*?</tr>", body, re.DOTALL)
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in [head, *rows]]
    texts = [[re.sub(r"<[^>]+>|&\w+;", "", cell) for cell in row] for row in cells]
    heights = [slide_text.row_height(row, slide_text.width(texts)) for row in texts[1:]]

    tags = ["crowded"] * slide_text.crowded(texts)

    def part(first: int, last: int) -> Any:
        # Inline sizes are for a notebook's page.
        html = re.sub(r'style="font-size:1em"', "", head) + "\n".join(rows[first:last]) + foot
        return _output_cell([nbformat.v4.new_output("display_data", data={"text/html": html})], *tags)

    _rows(deck, heights, part, answer)


def _output_cell(outputs: list[Any], *tags: str) -> Any:
    return nbformat.v4.new_code_cell("", outputs=outputs, metadata={"tags": list(tags)})


def _discussion(deck: Deck, questions: Sequence[tuple[str, str]]) -> None:
    deck.section("Discuss")
    for number, (question, answer) in enumerate(questions, 1):
        text = f"{number}. {question}"
        deck.add(_markdown_cell(text, "item"), slide_text.prose_height(text))
        deck.note(f"{text} *{answer}*" if "*" not in answer else f"{text} {answer}")
