"""Notebook 00, lab 01 and a figure with knobs in JupyterLab, as a person uses them: open, Run All, edit, check."""

import json
import re
import time

import pytest

FIRST = "notebooks/00_start_here.ipynb"
SCRIPT = "labs/01_frozen_embeddings/train.py"
ERA = "trl 0.14 (January 2025)"
MISTAKE = "it does what the symptom says"
BEFORE = "    config = GRPOConfig("
REPAIR = "    model.enable_input_require_grads()"
# What a reader must never scroll through: other libraries' notices, and progress bars. One warning is the subject.
NOISE = re.compile(r"Warning:(?! None of the inputs)|WARNING|it/s\b|\d+%\|")


def choose(page, *names):
    """Click through JupyterLab's menus."""
    page.locator(".lm-MenuBar-item", has_text=re.compile(f"^{names[0]}$")).click()
    for name in names[1:]:
        label = re.compile(rf"^{re.escape(name)}…?$")
        item = page.locator(".lm-Menu-item", has=page.locator(".lm-Menu-itemLabel", has_text=label)).last
        item.hover()
    item.click()


def open_file(page, lab, path):
    """Open a file by its address, as a link in the README would."""
    page.goto(f"{lab.url}/lab/tree/{path}?reset")
    page.wait_for_selector("#jp-main-dock-panel .jp-Document:not(.lm-mod-hidden)")


def read_notebook(lab, path):
    return json.loads((lab.folder / path).read_text())


def text_of(output):
    """Return the text of an output in a notebook's file."""
    if output["output_type"] == "error":
        return "\n".join(output["traceback"])
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", ""))


def test_the_first_notebook_from_open_to_the_verdict(page, lab, wait, pictures):
    notebook = read_notebook(lab, FIRST)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell in code:
        cell["outputs"], cell["execution_count"] = [], None
    (lab.folder / FIRST).write_text(json.dumps(notebook))
    open_file(page, lab, FIRST)
    page.locator(".jp-NotebookPanel .jp-Cell").first.wait_for()
    page.locator("#jp-bottom-panel", has_text="| Idle").wait_for()
    page.screenshot(path=pictures / "00-opened.png")

    choose(page, "Run", "Run All Cells")
    deadline = time.monotonic() + 480
    while True:
        # The cell that runs is the first that waits; a reader scrolls to it.
        running = page.evaluate(
            """() => {
              const cells = [...document.querySelectorAll('.jp-NotebookPanel .jp-CodeCell')];
              const cell = cells.find(c => c.querySelector('.jp-InputPrompt')?.innerText.includes('*'));
              if (!cell) return null;
              cell.scrollIntoView({block: 'center'});
              return cell.querySelector('.cm-content')?.innerText.slice(0, 60) ?? '';
            }"""
        )
        if running is None and lab.states(FIRST) == ["idle"]:
            break
        assert time.monotonic() < deadline, f"Run All has not ended; {running}"
        page.wait_for_timeout(250)

    page.keyboard.press("Control+s")

    def cells_of_code():
        return [cell for cell in read_notebook(lab, FIRST)["cells"] if cell["cell_type"] == "code"]

    wait(lambda: cells_of_code()[-1]["execution_count"], "it is not saved")
    saved = cells_of_code()
    outputs = [output for cell in saved for output in cell["outputs"]]
    assert all(cell["execution_count"] for cell in saved), "a cell did not run"
    assert not [text_of(each) for each in outputs if each["output_type"] == "error"]
    assert not [text_of(each) for each in outputs if each.get("name") == "stderr"]
    assert not [text_of(each) for each in outputs if NOISE.search(text_of(each))]
    assert sum("image/png" in each.get("data", {}) for each in outputs) >= 1
    assert sum("<table" in "".join(each.get("data", {}).get("text/html", "")) for each in outputs) >= 1
    assert any("✗ red flag" in text_of(each) for each in outputs)


def add_cell(page, text):
    """Type a cell at the end of the open notebook and run it."""
    panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
    cell = panel.locator(".jp-CodeCell").last
    cell.locator(".cm-content").click()
    page.keyboard.insert_text(text)
    page.keyboard.press("Shift+Enter")
    return cell


def new_notebook(page, lab, kernel):
    """Start a notebook from the launcher, in a kernel that is named there."""
    page.goto(f"{lab.url}/lab?reset")
    page.locator(".jp-LauncherCard", has_text=kernel).first.click()
    page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell").first.wait_for()
    # A cell that is run while the kernel is still being connected is dropped.
    page.locator("#jp-bottom-panel", has_text=f"{kernel} | Idle").wait_for()


@pytest.mark.parametrize("kernel", [ERA, "Python 3 (ipykernel)"], ids=["era", "today"])
def test_a_lab_from_its_mistake_to_the_repair(page, lab, wait, pictures, kernel, request):
    """train.py beside a notebook: the check names the mistake; the edit, saved, turns it to PASS."""
    name = "lab-era" if kernel == ERA else "lab-today"
    script = lab.folder / SCRIPT
    script.unlink(missing_ok=True)  # the check makes it
    original = script.with_name("start.py").read_text()
    request.addfinalizer(lambda: script.unlink(missing_ok=True))
    new_notebook(page, lab, kernel)
    outputs = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-OutputArea")
    add_cell(page, "%load_ext failurelab_course\nimport trl\nprint('trl', trl.__version__)")
    wanted = "trl 0.14" if kernel == ERA else "trl 1."
    wait(lambda: wanted in outputs.first.inner_text(), "trl's version")
    assert not NOISE.search(outputs.first.inner_text())
    add_cell(page, "%lab check 01")
    wait(lambda: MISTAKE in outputs.nth(1).inner_text(), "the mistake is not named")
    page.screenshot(path=pictures / f"{name}-mistake.png")

    # The editor, as a tab beside the notebook: find the place, write a line, save.
    page.locator(".jp-DirListing-item", has_text="labs").first.dblclick()
    page.locator(".jp-DirListing-item", has_text="01_frozen_embeddings").first.dblclick()
    page.locator(".jp-DirListing-item", has_text=re.compile(r"^train\.py")).first.dblclick()
    editor = page.locator(".jp-FileEditor:not(.lm-mod-hidden) .cm-content")
    line = editor.locator(".cm-line", has_text="config = GRPOConfig(")
    line.click()
    page.keyboard.press("Home")
    page.keyboard.press("Home")
    page.keyboard.insert_text(f"{REPAIR}\n")
    page.keyboard.press("Control+s")
    wait(lambda: REPAIR in script.read_text(), "the edit is not saved")
    page.screenshot(path=pictures / f"{name}-edited.png")
    assert script.read_text() == original.replace(BEFORE, f"{REPAIR}\n{BEFORE}")

    page.locator(".lm-TabBar-tab", has_text=re.compile("Untitled")).first.click()
    add_cell(page, "%lab check 01")
    wait(lambda: "PASS lab 01" in outputs.nth(2).inner_text(), "the repair does not pass")
    shown = outputs.nth(2).inner_text()
    assert "all 25 trainable tensors have a gradient" in shown and not NOISE.search(shown)
