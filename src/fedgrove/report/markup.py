r"""Docstrings as a terminal shows them: formulas as text, no markup, lines as wide as it is.

>>> plain(r"Round :math:`t`, shares :math:`\rho_t`; see :mod:`fedgrove.methods.ditto`, ``--set``::")
'Round t, shares rho_t; see fedgrove.methods.ditto, --set:'
"""

from __future__ import annotations

import re
import textwrap

SYMBOLS = {
    "varepsilon": "epsilon",
    "le": "<=",
    "leq": "<=",
    "ge": ">=",
    "geq": ">=",
    "ne": "!=",
    "neq": "!=",
    "approx": "~",
    "cdot": "*",
    "times": "x",
    "odot": "*",
    "pm": "+-",
    "to": "->",
    "leftarrow": "<-",
    "infty": "inf",
    "ldots": "...",
    "dots": "...",
    "cdots": "...",
    "ell": "l",
    "quad": "",
}
"""What commands of LaTeX look like in plain text. Any other stands for itself.

So a Greek letter has its name, as in the equations of methods and in what ``--set`` takes.
"""
DROPPED = ("left", "right", "mathrm", "mathbf", "mathcal", "text", "operatorname", "bar", "hat")
"""Commands that only say how something looks."""


def formula(latex: str) -> str:
    r"""A formula in LaTeX as text.

    >>> formula(r"d\,(1 - (1 - \rho)\, s / n)"), formula(r"\lambda_k = n_k / \sum_j n_j")
    ('d (1 - (1 - rho) s / n)', 'lambda_k = n_k / sum_j n_j')
    >>> formula(r"\frac{a + 1}{b_{up}} \le x^{2}"), formula(r"\sqrt{n} \in \mathcal{S}_t")
    ('(a + 1)/b_up <= x^2', 'sqrt(n) in S_t')
    """
    text = re.sub(r"\\[,;!: ]|~", " ", latex)
    text = text.replace(r"\|", "||").replace(r"\{", "{{").replace(r"\}", "}}")
    group = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
    text = re.sub(rf"\\[dt]?frac{group}{group}", _fraction, text)
    text = re.sub(rf"\\sqrt{group}", r"sqrt(\1)", text)
    text = re.sub(r"\\([A-Za-z]+)", _symbol, text)
    # Braces that only hold together go; those of a set were doubled above.
    text = re.sub(r"(?<!\{)\{([^{}]*)\}(?!\})", r"\1", text)
    return " ".join(text.replace("{{", "{").replace("}}", "}").split())


def _fraction(match: re.Match[str]) -> str:
    above, below = (_bracketed(part) for part in match.groups())
    return f"{above}/{below}"


def _bracketed(part: str) -> str:
    return f"({part})" if " " in part.strip() else part


def _symbol(match: re.Match[str]) -> str:
    name = match[1]
    if name in DROPPED:
        return ""
    return SYMBOLS.get(name, name)


def plain(text: str) -> str:
    """A text without markup: roles, backticks, asterisks of bold, the double colon of a block."""
    text = re.sub(r":math:`([^`]*)`", lambda match: formula(match[1]), text)
    # A role shows its title, or else what it points to.
    text = re.sub(r":\w+:`([^`<]+?)\s*<[^`]*>`", r"\1", text)
    text = re.sub(r":\w+:`[~!]?([^`]*)`", r"\1", text)
    text = re.sub(r"``([^`]*)``", r"\1", text)
    text = re.sub(r"`([^`\n]+)`_{0,2}", r"\1", text)
    text = re.sub(r"\*\*(\S[^*]*?)\*\*", r"\1", text)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


def laid_out(docstring: str, width: int) -> str:
    """A docstring for a terminal of that width: paragraphs filled, equations line by line.

    >>> print(laid_out("One two three.", 10))
    One two
    three.
    """
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", docstring.strip("\n")):
        if lines:
            lines.append("")
        rows = plain(block).splitlines()
        if rows[0].startswith(" "):
            for row in rows:
                lines += _equation(row, width)
        else:
            lines += _filled(rows, width)
    return "\n".join(lines)


def _filled(rows: list[str], width: int) -> list[str]:
    """A paragraph, or the items of a list, each with its lines below its first word."""
    items: list[str] = []
    for row in rows:
        begins_item = re.match(r"([-*]|\d+\.) ", row) is not None
        if begins_item or not items:
            items.append(row)
        else:
            items[-1] += " " + row.strip()
    lines: list[str] = []
    for item in items:
        mark = re.match(r"([-*]|\d+\.) ", item)
        indent = " " * len(mark[0]) if mark else ""
        lines += textwrap.wrap(
            item,
            width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _equation(row: str, width: int) -> list[str]:
    """A line of an equation; where it is too long, the part that does it comes on a line below."""
    row = row.rstrip()
    if len(row) <= width:
        return [row]
    left, arrow, part = row.partition(" -> ")
    indent = len(row) - len(row.lstrip()) + 4
    lines = textwrap.wrap(
        left.rstrip(),
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        # The spaces inside a line set symbols below each other.
        drop_whitespace=True,
    )
    if arrow:
        done_by = f"-> {part.strip()}"
        if len(lines[-1]) + 2 + len(done_by) <= width:
            lines[-1] += f"{done_by:>{width - len(lines[-1])}}"
        else:
            lines.append(f"{done_by:>{width}}")
    return lines
