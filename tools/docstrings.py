"""Docstrings as the site shows them: ours have Sphinx roles and doctests, it reads Markdown.

An extension of griffe, which mkdocstrings reads the code with (see mkdocs.yml). Only ``make docs``
loads it.
"""

import re

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`~?([^`]+)`")
ARGUMENT = re.compile(r"^(\w+(?:, \w+)*): (?=\S)")
DOCTEST = re.compile(r"^>>> .*\n(?:.+\n?)*", re.MULTILINE)


def as_markdown(text: str) -> str:
    """A docstring as Markdown.

    >>> print(as_markdown("See :class:`Task`::\\n\\n    code"))
    See `Task`:
    <BLANKLINE>
        code
    >>> as_markdown(">>> 1 + 1\\n2\\n") == "```pycon\\n>>> 1 + 1\\n2\\n```\\n"
    True
    """
    text = ROLE.sub(r"`\1`", text)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    text = "\n\n".join(_listed(paragraph) for paragraph in text.split("\n\n"))
    # Without a fence, the brackets of a doctest would be taken for links.
    return DOCTEST.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)


def _listed(paragraph: str) -> str:
    """A paragraph of ``name: what it is`` as a list; any other as it is.

    >>> print(_listed("data: a name,\\n    or a file.\\nlr, epochs: numbers."))
    - **data**: a name,
        or a file.
    - **lr, epochs**: numbers.
    >>> _listed("One thing: a sentence.\\nAnd more.")
    'One thing: a sentence.\\nAnd more.'
    """
    lines = paragraph.split("\n")
    begins = [line for line in lines if not line.startswith(" ")]
    if not all(ARGUMENT.match(line) for line in begins) or lines[0] not in begins:
        return paragraph
    return "\n".join(ARGUMENT.sub(r"- **\1**: ", line) for line in lines)


class Docstrings(griffe.Extension):
    """Turns every docstring into Markdown when it is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Called by griffe for everything that has a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
