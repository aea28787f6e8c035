"""Determines the speaker of a message by its role, its type, its author or its envelope."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Literal

Speaker = Literal["user", "agent", "result"]
SPEAKERS: Final[dict[str, Speaker | None]] = {  # The speaker of a message by its role or type, without punctuation.
    # Instructions are not part of a run.
    **dict.fromkeys(("system", "developer", "systemprompt"), None),
    **dict.fromkeys(("user", "human", "userprompt", "userproxy"), "user"),
    **dict.fromkeys("assistant ai model agent bot chatbot gpt gemini llm toolcall functioncall".split(), "agent"),  # noqa: SIM905
    **dict.fromkeys(
        "tool function toolresponse toolresult toolreturn functionexecutionresult functionresponse functionresult ipython "  # noqa: SIM905
        "environment observation".split(),
        "result",
    ),
}
ONLY_ROLES: Final = (
    *("toolcall", "functioncall", "toolresponse", "toolresult", "toolreturn", "functionresponse"),
    "functionresult",
)
"""Roles that are types of blocks elsewhere."""
_ROLE_KEYS: Final = ("role", "Role", "role_at_backend", "author", "from", "sender", "info")
"""Fields that may hold the name of a role, or an object that has it."""


def in_one_view(turns: Sequence[Any], *, is_of_asker: bool = False) -> Sequence[Any]:
    """Return the messages of a chat between agents with the roles that they have for the agent that is asked.

    In AG2, a chat has a copy for each agent, and the role of a message depends on the copy. Roles are replaced if the copy is
    another agent's: if an agent that calls tools speaks as the user, if roles contradict names, or if ``is_of_asker`` is true.
    """
    named = [turn for turn in turns if isinstance(turn, dict) and isinstance(turn.get("name"), str)]
    callers = {turn["name"] for turn in named if turn.get("tool_calls")}
    spoken = [turn for turn in named if turn.get("role") in ("user", "assistant") and not turn.get("tool_calls")]
    of_users = {turn["name"] for turn in spoken if turn["role"] == "user"}
    are_unlike = any(SPEAKERS.get(role_of(turn["name"])) not in (None, SPEAKERS[turn["role"]]) for turn in spoken)
    if not spoken or not (is_of_asker or are_unlike or callers & of_users):
        return turns
    roles = {id(turn): "user" if turn["name"] == spoken[0]["name"] else "assistant" for turn in spoken}
    return [turn | {"role": roles[id(turn)]} if id(turn) in roles else turn for turn in turns]


def is_message(value: object) -> bool:
    """Return whether a value looks like a chat message."""
    return isinstance(value, dict) and isinstance(with_role(value).get("role"), str)


def with_role(value: dict[str, Any]) -> dict[str, Any]:
    """Return a message with a ``role``, even if it has a type, an author or an envelope instead, or is a constructor's call.

    A value that names no speaker is returned unchanged.
    """
    kind: object = named_type(value)
    fields: object = value
    if role_of(value.get("role_type")) in SPEAKERS:
        # In CAMEL, the field ``role`` holds the role for one agent, in Zep a name.
        return value | {"role": role_of(value["role_type"])}
    if isinstance(value.get("role"), str):
        return value
    if len(value) == 1 and isinstance(inner := next(iter(value.values())), dict) and role_of(next(iter(value))) in SPEAKERS:
        # A component may have the name of a role. Then it holds a list of messages.
        return value if "messages" in inner else inner | {"role": role_of(next(iter(value)))}
    for inner in (value[key] for key in ("message", "llm_message", "content") if key in value):
        # A choice or an event holds its message.
        if isinstance(inner, dict) and isinstance(inner.get("role"), str):
            return dict(inner)
    for holder in (value[key] for key in _ROLE_KEYS if key in value):
        name = holder.get("role", holder.get("label", holder.get("Label"))) if isinstance(holder, dict) else holder
        if role_of(name) in SPEAKERS:
            return value | {"role": role_of(name)}
    if kind == "constructor" and isinstance(value.get("id"), list) and value["id"]:
        kind, fields = value["id"][-1], value.get("kwargs")
    elif isinstance(value.get("data"), dict):
        fields = value["data"]
    if isinstance(fields, dict) and {"content", "message", "text"} & set(fields):
        is_of_autogen = isinstance(value.get("source"), str) and isinstance(kind, str) and kind.endswith(("Message", "Event"))
        if (role := role_of(kind)) in SPEAKERS and (role not in ONLY_ROLES or str(kind).endswith(("Message", "message"))):
            return fields | {"role": role}
        if is_of_autogen:
            return fields | {"role": "user" if value["source"] == "user" else "assistant"}
    has_calls = isinstance(value.get("tool_calls"), list) and "response" not in value
    return {"role": "assistant"} | value if has_calls else value


@lru_cache(maxsize=1_024)
def _plain_role(name: str) -> str:
    parts = [part for part in name.lower().split(".") if part != "message"] or [""]
    return re.sub(r"[\W_]+", "", parts[-1]).removesuffix("chunk").removesuffix("message")


def role_of(name: object) -> str:
    """Return the name of a role or of a type of messages in plain letters, without endings such as ``message``."""
    return _plain_role(name[:64]) if isinstance(name, str) else ""


def named_type(block: dict[str, Any]) -> str:
    """Return the type of an object from the first field that names one; empty if there is none."""
    keys = ("type", "part_kind", "kind", "$type", "block_type", "message_type")
    return next((kind for key in keys if isinstance(kind := block.get(key), str)), "")
