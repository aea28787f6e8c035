"""Makes chats of runs, for trainers: their texts and calls, the system's texts, and the definitions of the tools.

Turns come from the pieces of the run. System texts and definitions are not part of what is scored, so they are found by their
shapes in the records of the run: requests to models, attributes of spans, and the beginnings of sessions.
"""

import json
import re
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

from kp_scorer.adapters.attributes import attributes_of
from kp_scorer.adapters.building import Run
from kp_scorer.adapters.messages import messages_in
from kp_scorer.adapters.node import Node, parsed
from kp_scorer.adapters.pieces import Piece, free_call_id
from kp_scorer.adapters.roles import with_role
from kp_scorer.errors import NotConverted
from kp_scorer.trace import ReasoningTrace

Message = dict[str, Any]

_SYSTEM_ROLES: Final = ("system", "developer")
_SYSTEM_KEYS: Final = frozenset(
    "system instructions base_instructions system_instruction systemInstruction system_prompt systemPrompt backstory "  # noqa: SIM905
    "gen_ai.system_instructions".split()
)
_OF_REQUESTS: Final = frozenset(
    "messages contents input model cwd prompt tools gen_ai.operation.name goal profileName".split()  # noqa: SIM905
)
"""An object with one of these fields may have system texts. In other objects, a field ``system`` means something else."""
_TOOLS_KEYS: Final = frozenset("tools functions tool_definitions dynamic_tools gen_ai.tool.definitions ai.prompt.tools".split())  # noqa: SIM905
_BESIDE_A_ROLE: Final = _TOOLS_KEYS | {"backstory"}
"""An object with a role and one of these fields is not a message."""
_TEXTS_OF_JSON: Final = frozenset(
    "input messages prompt request body metadata input.value gen_ai.input.messages ai.prompt.messages ai.prompt "  # noqa: SIM905
    "gen_ai.system_instructions gen_ai.tool.definitions traceloop.entity.input llm.invocation_parameters gen_ai.prompt events "
    "langfuse.observation.input mlflow.spanInputs gcp.vertex.agent.llm_request".split()
)
_RETURNED: Final = frozenset("output outputs result observation arguments toolUseResult response choices".split())  # noqa: SIM905
_FLAT_ROLE: Final = re.compile(r"((?:llm\.input_messages|gen_ai\.prompt)\.\d+(?:\.message)?)\.role")
_FLAT_TOOL: Final = re.compile(r"llm\.tools\.\d+\.tool\.json_schema|(llm\.request\.functions\.\d+)\.name")
_SCHEMAS: Final = ("parameters", "input_schema", "inputSchema", "parametersJsonSchema")


class Chat(NamedTuple):
    """The messages of a run and the definitions of its tools, as in Chat Completions; arguments are texts, mostly of JSON."""

    messages: list[Message]
    tools: list[dict[str, Any]]


def chat_of(run: Run) -> Chat:
    """Return a converted run as a chat."""
    context = _Context()
    for record in run.records:
        context.read(record.value)
    system = [{"role": "system", "content": "\n\n".join(context.texts)}] if context.texts else []
    return Chat([*system, *_messages(run.pieces)], list(context.tools.values()))


def chat_of_trace(trace: ReasoningTrace) -> Chat:
    """Return a trace that was not converted as a chat, whose turns are the trace's steps and, at the end, its result."""
    nowhere = Node(0, "", None)
    pieces = [Piece(nowhere, "user", trace.task.objective)]
    for number, step in enumerate(trace.steps, 1):
        call_id = f"call_{number}" if step.tool and step.output_summary else ""
        if step.tool:
            pieces.append(Piece(nowhere, "call", name=step.tool.name, arguments=step.input, call_id=call_id))
        elif step.content:
            pieces.append(Piece(nowhere, "result" if step.type == "observation" else "agent", step.content))
        if step.tool and step.output_summary:
            pieces.append(Piece(nowhere, "result", step.output_summary, call_id=call_id))
    if pieces[-1].kind != "agent":
        pieces.append(Piece(nowhere, "agent", trace.outcome.result_summary))
    return Chat(list(_messages(pieces)), [])


def _messages(pieces: Sequence[Piece]) -> Iterator[Message]:
    """Yield the messages of a run.

    Everything that an agent says and calls up to the next result is one message. Each result names its call.
    """
    answered = _answered_calls(pieces)
    ids: dict[int, str] = {}  # The id of each call, by the call's place.
    open_ids = set[str]()  # The ids of calls without a result so far.
    own_ids = {piece.call_id for piece in pieces}
    said: list[str] = []
    calls: list[Message] = []
    for place, piece in enumerate(pieces):
        if piece.kind == "agent":
            said.append(piece.text)
        elif piece.kind == "call":
            call_id = piece.call_id
            if not call_id or call_id in open_ids:
                call_id = free_call_id(len(ids) + 1, own_ids)
            ids[place] = call_id
            open_ids.add(call_id)
            function = {"name": piece.name, "arguments": _arguments(piece)}
            calls.append({"id": call_id, "type": "function", "function": function})
        else:
            yield from _turn(said, calls)
            said, calls = [], []
            if (call := answered.get(place)) is None:
                # A result without a call, such as an environment's, is the next message to the agent.
                yield {"role": "user", "content": piece.text}
            else:
                open_ids.remove(ids[call])
                yield {"role": "tool", "tool_call_id": ids[call], "name": pieces[call].name, "content": piece.text}
    yield from _turn(said, calls)


def _turn(said: Sequence[str], calls: Sequence[Message]) -> Iterator[Message]:
    if said or calls:
        turn = {"role": "assistant", "content": "\n\n".join(filter(None, said))}
        yield turn | {"tool_calls": calls} if calls else turn


def _answered_calls(pieces: Sequence[Piece]) -> dict[int, int]:
    """Return the place of the call that each result answers, by the place of the result.

    A result answers the call with its id. If no call has its id, it answers a call of its tool, or else any call, that no other
    result names by an id. Of several calls, it answers the first in the newest turn. A second result of a call answers none.
    """
    call_ids = {piece.call_id for piece in pieces if piece.kind == "call" and piece.call_id}
    answered: dict[int, int] = {}
    with_result = set[int]()
    for by_id in (True, False):
        # The open calls by what results name them by, and all by None; the one to answer first is last.
        waiting = defaultdict[str | None, list[int]](list)
        for place, piece in _first_calls_last(pieces):
            names = (piece.call_id,) if by_id else (piece.name, None)
            if piece.kind == "call":
                for name in names:
                    waiting[name].append(place)
            elif piece.kind == "result" and (piece.call_id in call_ids) is by_id:
                open_calls = (_next_call(waiting[name], with_result) for name in names)
                if (call := next((call for call in open_calls if call is not None), None)) is not None:
                    answered[place] = call
                    with_result.add(call)
    return answered


def _first_calls_last(pieces: Sequence[Piece]) -> Iterator[tuple[int, Piece]]:
    """Yield the pieces with their places, those of each turn of the agent in reverse order."""
    for is_turn, group in groupby(enumerate(pieces), lambda each: each[1].kind in ("agent", "call")):
        turn = list(group)
        yield from reversed(turn) if is_turn else turn


def _next_call(calls: list[int], with_result: Container[int]) -> int | None:
    """Remove and return the last of these calls that has no result; None if there is none."""
    while calls:
        if (call := calls.pop()) not in with_result:
            return call
    return None


def _arguments(call: Piece) -> str:
    """Return the arguments of a call as a text, the source's own or JSON, so that a table's column has one type for all."""
    if isinstance(call.arguments, str):
        return call.arguments
    return json.dumps({} if call.arguments is None else call.arguments, ensure_ascii=False)


class _Context:
    """Collects the system texts and the definitions of tools in records, outside of calls and answers, once each, in order."""

    def __init__(self) -> None:
        self.texts: dict[str, None] = {}
        self.tools: dict[str, dict[str, Any]] = {}  # The definition of each tool, by its name.

    def read(self, record: object) -> None:
        """Search a record, in time that is linear in its size."""
        waiting = [record]
        while waiting:
            value = waiting.pop()
            if isinstance(value, list):
                value = _fields_of_pairs(value) or value
            if isinstance(value, list):
                # Some recorders write each message as text.
                waiting += map(parsed, reversed(value))
            elif isinstance(value, dict):
                waiting += reversed(list(self._read_object(value)))

    def _read_object(self, value: dict[str, Any]) -> Iterator[object]:
        """Read the fields of an object itself; yield the values in it that remain to be searched."""
        role = value.get("role", value.get("source"))
        message = value if isinstance(role, str) else with_role(value)
        if not value.keys() & _BESIDE_A_ROLE:
            if message.get("role", role) in _SYSTEM_ROLES:
                self._add(message.get("content", message.get("parts", message.get("message"))))
                return
            if isinstance(role, str):
                if value.get("action") == "system" and isinstance(arguments := value.get("args"), dict):
                    self._add(arguments.get("content"))
                return
        if value.get("name") == "gen_ai.system.message" and isinstance(pairs := value.get("attributes"), list):
            self._add(_fields_of_pairs(pairs).get("content"))
            return
        for key, inner in value.items():
            if key in _SYSTEM_KEYS and value.keys() & _OF_REQUESTS:
                self._add(inner)
            elif key in _TOOLS_KEYS:
                self._add_definitions(parsed(inner))
            elif match := _FLAT_ROLE.fullmatch(key):
                if inner in _SYSTEM_ROLES:
                    text = f"{match[1]}.contents.0.message_content.text"
                    self._add(value.get(f"{match[1]}.content", value.get(text)))
            elif match := _FLAT_TOOL.fullmatch(key):
                flat = {name: value.get(f"{match[1]}.{name}") for name in ("name", "description", "parameters")}
                self._add_definitions([flat if match[1] else inner])
            elif key not in _RETURNED:
                if key in _TEXTS_OF_JSON:
                    inner = parsed(inner)
                    inner = messages_in(inner) if isinstance(inner, str) else inner
                yield inner

    def _add_definitions(self, tools: object) -> None:
        for definition in _definitions(tools):
            self.tools.setdefault(definition["function"]["name"], definition)

    def _add(self, content: object) -> None:
        content = parsed(content)
        if isinstance(content, dict):
            content = content.get("parts", content.get("text", content.get("content")))
        if isinstance(content, list):
            content = [block.get("text", block.get("content")) if isinstance(block, dict) else block for block in content]
            content = "\n".join(text for text in content if isinstance(text, str))
        if isinstance(content, str) and content.strip():
            self.texts[content] = None


def _fields_of_pairs(pairs: list[Any]) -> dict[str, Any]:
    """Return OpenTelemetry's pairs of a key and a typed value as an object; an empty one if any item is no such pair."""
    try:
        return attributes_of(Node(0, "", {"attributes": pairs})).object()
    except NotConverted:
        return {}


def _definitions(tools: object) -> Iterator[dict[str, Any]]:
    """Yield the definitions in a list of tools, of any provider, in the form of Chat Completions."""
    for tool in tools if isinstance(tools, list) else []:
        tool = parsed(tool)
        if not isinstance(tool, dict):
            continue
        for declared in tool.get("functionDeclarations") or tool.get("function_declarations") or [tool]:
            function = next(
                (declared[key] for key in ("function", "toolSpec") if isinstance(declared.get(key), dict)), declared
            )
            if isinstance(name := function.get("name"), str) and name:
                schema = parsed(next((function[key] for key in _SCHEMAS if function.get(key) is not None), None))
                schema = schema.get("json", schema) if isinstance(schema, dict) else {"type": "object", "properties": {}}
                # Some chat templates fail without a description.
                fields = {"name": name, "description": function.get("description") or "", "parameters": schema}
                yield {"type": "function", "function": fields}
