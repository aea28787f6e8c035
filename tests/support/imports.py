"""Which module of a source tree imports which, read from the source: also what is imported in functions, or for types alone."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple


class Import(NamedTuple):
    """One import of one module by another of the same tree."""

    importer: str
    imported: str
    place: str
    """File and line, the file beginning with the name of the tree."""

    def __str__(self) -> str:
        return f"{self.place}: {self.importer} imports {self.imported}"


def modules_in(root: Path) -> dict[str, Path]:
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def imports_in(root: Path) -> list[Import]:
    """Every import within the package in the folder ``root``.

    Importing a module imports the packages that hold it too; that is not counted, as it would make a circle of each package
    that names its own modules.
    """
    modules = modules_in(root)
    imports = []
    for importer, path in modules.items():
        package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            place = f"{path.relative_to(root.parent)}:{getattr(node, 'lineno', 0)}"
            own = (name for name in _imported(node, package, modules) if name.partition(".")[0] == root.name)
            imports += [Import(importer, imported, place) for imported in own]
    return imports


def _imported(node: ast.AST, package: str, modules: Mapping[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, base] if base else above)
        for alias in node.names:
            submodule = f"{base}.{alias.name}"
            yield submodule if submodule in modules else base
