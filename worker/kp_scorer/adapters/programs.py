"""Removes texts that the program around an agent wrote in the name of the user: reminders, its own commands, its events."""

import re
from collections.abc import Iterable
from typing import Final

from kp_scorer.adapters.node import parsed
from kp_scorer.adapters.pieces import Piece
from kp_scorer.adapters.roles import role_of

_TAG: Final = re.compile(
    r"\s*+<((?:system|local|command|environment|ide|hook|bash|task|qwen|permissions|user)[-_:][\w:-]{1,60}"
    r"|task|[\w:-]{1,60}[-_](?:reminder|context|caveat|stdout|stderr|instructions|notification|details))(?:\s[^<>]{0,200})?>"
)
"""Matches the tag that begins an addition of a program to a text of the user. Users do not type such names."""
_CLOSING: Final = re.compile(r"</([\w:-]{1,80})>\s{0,9}\Z")
_MOST_CLOSING: Final = 100  # The most characters of a closing tag with the white space behind it.
_OF_USERS: Final = ("task", "user_query", "user-query", "user_message", "user_request", "user_input", "user_prompt")
_COMMAND: Final = re.compile(r"<command-name>\s*+([^<]{1,200})</command-name>")
_ARGUMENTS: Final = re.compile(r"<command-args>([^<]++)</command-args>")
_BARE_COMMAND: Final = re.compile(r"/[\w:-]{1,60}\s{0,9}")
_NOTES: Final = ("[Request interrupted by user", "This is the Gemini CLI. We are setting up the context")
"""Beginnings of messages that programs write in the name of the user."""
_ENDING: Final = "TERMINATE"  # An agent of AG2 ends its chat with this.
_INSTRUCTION: Final = "You are "
_AGREEMENTS: Final = ("Ok.", "OK.", "OK", "Ok")
_REPLIES: Final = ("Got it. Thanks for the context!",)


def without_program_texts(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces of a run without the texts that a program wrote in the name of the user."""
    pieces = list(pieces)
    begins = [piece.kind for piece in pieces[:3]] == ["user", "agent", "user"] and pieces[1].text.strip() in _AGREEMENTS
    if begins and pieces[0].text.startswith(_INSTRUCTION):
        # Drop the first message, which only says what the agent is, and the reply: the task comes next.
        pieces = pieces[2:]
    events = [_event(piece.text) if piece.kind == "user" else None for piece in pieces]
    has_events = any(event and event[0] == "user" for event in events)
    remaining: list[Piece] = []
    for piece, event in zip(pieces, events, strict=True):
        if piece.kind == "user":
            role, content = event if event and has_events else ("user", piece.text)
            text = without_additions(content) if role == "user" else ""
            if text.startswith(_NOTES) or not text.strip():
                continue
            if remaining and remaining[-1].kind == "user" and _BARE_COMMAND.fullmatch(remaining[-1].text):
                # Drop the command before, which the program has carried out itself, without the agent.
                remaining.pop()
            remaining.append(piece if text == piece.text else piece._replace(text=text))
        elif piece.kind != "agent" or not (
            piece.text.strip() == _ENDING or (piece.text.startswith(_REPLIES) and not remaining)
        ):
            remaining.append(piece)
    return remaining


def _event(text: str) -> tuple[str, str] | None:
    """Return the role and the text of an event that a message of the user holds as JSON; None if it holds none."""
    event = parsed(text)
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        return None
    texts = (event.get(key) for key in ("message", "content"))
    return role_of(event["type"]), next((text for text in texts if isinstance(text, str)), "")


def without_additions(text: str) -> str:
    """Return a text of the user without the elements that a program put before it, behind it or around it."""
    if command := _COMMAND.search(text, 0, 2_000):
        arguments = _ARGUMENTS.search(text)
        return f"{command[1].strip()} {arguments[1].strip() if arguments else ''}".strip()
    start, end = 0, len(text)
    while tag := _TAG.match(text, start):
        closing = text.find(f"</{tag[1]}>", tag.end())
        if tag[1] in _OF_USERS:
            return text[tag.end() : closing if closing >= 0 else end].strip()
        if closing < 0:
            break
        start = closing + len(f"</{tag[1]}>")
    while last := _CLOSING.search(text, max(start, end - _MOST_CLOSING), end):
        opening = text.rfind(f"<{last[1]}", start, last.start())
        if opening < 0 or not _TAG.match(text, opening):
            break
        end = opening
    return text if end - start == len(text) else text[start:end].strip()
