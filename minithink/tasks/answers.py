r"""Where the short answer stands in a text: in a box, behind `####`, or behind "the answer is".

A model's text and the solutions that datasets publish are read alike. All functions take time in proportion to the
length of the text.
"""

from __future__ import annotations

import re

# A box begins: \boxed{, \fbox{, \framebox[2cm][c]{, or \boxed without a brace. The last part is the brace, if any.
_BEGIN = r"\\(?:boxed|fbox|framebox)(?![A-Za-z])"
_OPTIONS = r"(?:\[[^\[\]{}]{0,40}\]){0,2}"
BOX = re.compile(rf"{_BEGIN}{_OPTIONS}[ \t]{{0,9}}(?P<brace>\{{?)")
# A box, a brace, or a backslash with the character that it escapes; \\boxed is a box behind a stray backslash.
_TOKENS = re.compile(rf"{BOX.pattern}|\\(?!{_BEGIN}).|[{{}}]", re.DOTALL)
# Without braces a box holds what follows, up to the end of the formula or of the word.
_WORD = re.compile(r"[^\s$]{0,200}")
_FORMULA_ENDS = re.compile(r"\$|\\[)\]]|\n")
_FORMULA_MARKS = re.compile(r"\\[()\[\]$]|\$|\n\n")

# "The answer is", "Answer:", "Final answer" on a line of its own; stars are Markdown's.
_STATEMENT = re.compile(
    r"\b(?:final[ \t]{1,3}answer[*\s]{0,9}(?:\bis\b|[:=]|\n)|answer[*\s]{0,9}(?:\bis\b|[:=]))"
    r"(?! {0,3}not\b)[*:\s]{0,9}",
    re.IGNORECASE,
)
_SENTENCE_ENDS = re.compile(r"[.;!?](?=\s|$)|\n")
# A formula between dollars, \(…\) or \[…\], or bold text. A space before the second dollar: the two are currencies.
_WRAPPED = re.compile(
    r"\$\$?(?!\s)([^$]{1,400}?)(?<!\s)\$\$?|\\\(((?:(?!\\[()]).){1,400}?)\\\)|\\\[((?:(?!\\[\[\]]).){1,400}?)\\\]"
    r"|\*\*([^*\n]{1,400})\*\*",
    re.DOTALL,
)
MARK = "####"  # stands before the answers of grade-school problems
_NUMERAL = re.compile(r"-?\$?-?[0-9][0-9,]{0,99}(?:\.[0-9]{1,99})?(?:/[0-9]{1,99})?%?")
_THOUSANDS = re.compile(r"-?\$?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")


def boxed(text: str) -> str | None:
    r"""The content of the last closed box of the answer, such as \boxed{…}; None if there is none.

    Boxes are \boxed, \fbox and \framebox. Braces may nest; \{ and \} do not count as braces. A box without braces,
    \boxed 7, holds what follows it, up to the end of its formula or word. What stands before `</think>` is no answer.
    """
    answer = text.rpartition("</think>")[2]
    found: tuple[int, str] | None = None  # where the box begins, and its content
    open_boxes: list[re.Match[str] | None] = []  # None: a brace that belongs to no box
    for token in _TOKENS.finditer(answer):
        if token["brace"] == "{":
            open_boxes.append(token)
        elif token["brace"] == "":
            content = _unbraced(answer, token.end())
            if content:
                found = (token.start(), content)
        elif token[0] == "{":
            open_boxes.append(None)
        elif token[0] == "}" and open_boxes:
            begin = open_boxes.pop()
            if begin is not None and (found is None or begin.start() > found[0]):
                found = (begin.start(), answer[begin.end() : token.start()])
    return None if found is None else found[1]


def stated(text: str) -> str | None:
    """The answer that a text gives: its last box; without a box the number behind its last `####`, or its last
    statement, as in "The answer is 12." None: there is none. A text whose box is not closed has no answer."""
    box = boxed(text)
    if box is not None:
        return box
    answer = text.rpartition("</think>")[2]
    if BOX.search(answer):
        return None
    marked = _marked(answer)
    if marked is not None and _NUMERAL.fullmatch(marked):  # else it may be a heading
        return marked
    return _statement(answer)


def short_answer(solution: str) -> str:
    r"""The short answer that a dataset's solution holds, or the solution as it is if no spelling is known.

    A formula's dollars, as in $\frac{1}{2}$, are left out, and so are the thousands commas behind `####`.
    """
    found = stated(solution)
    marked = _marked(solution)
    if marked is not None and boxed(solution) is None and (found == marked or solution.rstrip().endswith(marked)):
        found = marked
        if _THOUSANDS.fullmatch(marked):
            found = marked.replace(",", "").replace("$", "")
    if found is not None:
        return _unwrapped(found)
    alone = _unwrapped(solution)
    return solution if alone == solution.strip() else alone


def seems_long(answer: str) -> bool:
    """Whether a right answer looks like a whole solution, which no reply equals: several lines or sentences."""
    text = answer.strip()
    sentences = re.findall(r"[A-Za-z]{2,}[)}$]{0,3}[.!?](?=\s)", text)
    return "\n\n" in text or len(text) > 400 or len(sentences) > 1 or ("\n" in text and len(text) > 100)


def _unbraced(text: str, start: int) -> str:
    """The content of a box without braces that begins there."""
    word = _WORD.match(text, start)
    assert word is not None
    end = word.end()
    ends_formula = _FORMULA_ENDS.search(text, start, start + 200)
    if ends_formula and ends_formula[0] != "\n" and _in_formula(text, start):
        end = ends_formula.start()
    content = text[start:end]
    for mark in (r"\)", r"\]", "}"):  # of what stands around the box
        before, found, _ = content.partition(mark)
        if found and (mark != "}" or before.count("{") <= before.count("\\{")):
            content = before
    return content.strip().rstrip(".,;:!?").strip()


def _in_formula(text: str, at: int) -> bool:
    """Whether a place is inside of a formula, by the marks of the 400 characters before it."""
    inside = False
    for mark in _FORMULA_MARKS.finditer(text, max(0, at - 400), at):
        if mark[0] == "$":
            inside = not inside
        elif mark[0] in (r"\(", r"\["):
            inside = True
        elif mark[0] != r"\$":
            inside = False
    return inside


def _marked(text: str) -> str | None:
    """The line behind the last `####` of a text; None: there is no such mark, or nothing stands behind it."""
    before, mark, behind = text.rpartition(MARK)
    if not mark or before.endswith("#"):
        return None
    line = behind.lstrip(" \t").partition("\n")[0]
    return line.strip().rstrip(".").strip() or None


def _statement(text: str) -> str | None:
    """What the last "answer is", "Answer:" or "Final answer" of a text says, without a formula's dollars."""
    ends = [statement.end() for statement in _STATEMENT.finditer(text)]
    if not ends:
        return None
    wrapped = _WRAPPED.match(text, ends[-1])
    if wrapped:
        return _unwrapped(wrapped[0])
    line = text[ends[-1] : ends[-1] + 400]
    sentence_ends = _SENTENCE_ENDS.search(line)
    if sentence_ends:
        line = line[: sentence_ends.start()]
    return _unwrapped(line.strip().rstrip(".*").strip()) or None


def _unwrapped(answer: str) -> str:
    """The answer without dollars, \\(…\\) or ** around all of it."""
    answer = answer.strip()
    whole = _WRAPPED.fullmatch(answer)
    if whole is None:
        return answer
    inside = next(group for group in whole.groups() if group is not None)
    return _unwrapped(inside)
