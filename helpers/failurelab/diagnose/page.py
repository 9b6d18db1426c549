"""The page of a diagnosis, for people who would rather look: the curves as SVG, without a script or another file."""

import html as markup
import math

from failurelab.diagnose import rules
from failurelab.diagnose.answer import Answer, verdict

_CURVES = (
    ("reward", "reward"), ("reward_std", "reward_std"), ("zero_spread", "groups without variance"),
    ("grad_norm", "grad_norm"), ("loss", "loss"), ("kl", "kl"), ("entropy", "entropy"), ("length", "mean length"),
    ("clipped", "clipped ratio"), ("learning_rate", "learning rate"), ("engine_gap", "engine against trainer"),
)  # fmt: skip
_WIDE, _HIGH, _POINTS = 360, 120, 400
_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
body{color:#1b1b1b;background:#fff}
figure{display:inline-block;margin:0 1rem 1rem 0}figcaption{font-size:.85rem}svg{background:#f6f6f6}
li.for::marker{content:"+ "}li.against::marker{content:"\\2212 "}code{overflow-wrap:anywhere}"""


def html(answers: list[Answer]) -> str:
    """Return one page for all runs."""
    body = "".join(_run(answer) for answer in answers)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>failurelab diagnose</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


def _run(answer: Answer) -> str:
    parts = [f"<h1>{_safe(answer.run)}</h1><p><strong>{_safe(verdict(answer))}</strong></p>"]
    parts += [f"<p>{_safe(sign)}</p>" for sign in answer.signs]
    for cause in answer.causes:
        word = "Cause" if cause.weight >= rules.CONVICTS else "Possible"
        since = f", from step {cause.from_step:g} on" if cause.from_step is not None else ""
        parts.append(
            f"<h2>{word}: {_safe(cause.failure)} {_safe(cause.title)}</h2><p>weight {cause.weight}{since}</p><ul>"
        )
        parts += [f'<li class="for">{_safe(text)}</li>' for text in cause.pro]
        parts += [f'<li class="against">{_safe(text)}</li>' for text in cause.contra]
        parts.append(f"</ul><p>What would tell: {_safe(cause.probe)}</p>")
    if answer.probe:
        parts.append(f"<p>Next: {_safe(answer.probe)}</p>")
    parts += [f"<p>{_safe(note)}</p>" for note in answer.notes]
    history = answer.evidence.history
    if history is not None:
        parts.append("<h2>Curves</h2>")
        parts += [_curve(label, *history.pairs(name)) for name, label in _CURVES]
        for name, values in history.rewards.items() if len(history.rewards) > 1 else ():
            kept = [(step, value) for step, value in zip(history.steps, values) if math.isfinite(value)]
            parts.append(_curve(f"reward {name}", [step for step, _ in kept], [value for _, value in kept]))
    for title, lines in (("Read", answer.evidence.read), ("Not read", answer.evidence.not_read)):
        if lines:
            parts.append(f"<h2>{title}</h2><ul>{''.join(f'<li>{_safe(line)}</li>' for line in lines)}</ul>")
    return "".join(parts)


def _curve(label: str, steps: list[float], values: list[float]) -> str:
    """Return a curve as SVG; a long one is drawn through the means of equally many neighbours."""
    if len(values) < 2:
        return ""
    size = -(-len(values) // _POINTS)
    xs = [sum(steps[at : at + size]) / len(steps[at : at + size]) for at in range(0, len(steps), size)]
    ys = [sum(values[at : at + size]) / len(values[at : at + size]) for at in range(0, len(values), size)]
    low, high, left, right = min(ys), max(ys), min(xs), max(xs)
    span, width = (high - low) or 1.0, (right - left) or 1.0
    points = " ".join(
        f"{4 + (x - left) / width * (_WIDE - 8):.1f},{_HIGH - 4 - (y - low) / span * (_HIGH - 8):.1f}"
        for x, y in zip(xs, ys)
    )
    caption = f"{label}: {low:.3g} to {high:.3g}, steps {left:g} to {right:g}"
    return (
        f'<figure><svg viewBox="0 0 {_WIDE} {_HIGH}" width="{_WIDE}" height="{_HIGH}" role="img" '
        f'aria-label="{_safe(caption)}">'
        f'<polyline points="{points}" fill="none" stroke="#0b5394" stroke-width="1.5"/></svg>'
        f"<figcaption>{_safe(caption)}</figcaption></figure>"
    )


def _safe(text: str) -> str:
    return markup.escape("".join(c for c in str(text) if c >= " " or c in "\n\t"))
