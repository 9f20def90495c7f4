"""A package imports from another first-party package nothing but public names: those that an `__all__` lists.

A name is public if the folder that defines it, or a folder above that one, lists it and passes it on; or if the module
that defines it lists it and each package on the way down lists the next part (so `unidist.__all__` names the modules in
its root that plugins use). A whole module is public in the second way only, a package also by an `__all__` with names.
"""

from __future__ import annotations

from tools.layout.project import CORE, Import, Project


def check_public_names(project: Project) -> list[str]:
    """Return each import of a name of another first-party package that is not public there."""
    return [
        f"{module.path}:{item.line}: imports {_full_name(item)}, which no __all__ lists"
        for module in project.modules.values()
        if module.package != CORE
        for item in module.imports
        if item.package in project.packages - {module.package} and not is_public(project, item.module, item.name)
    ]


def is_public(project: Project, module: str, name: str) -> bool:
    """Return whether another package may write `from module import name`, or `import module` if `name` is ""."""
    if module not in project.modules:
        return False
    named = project.modules[module]
    if not name:
        return _is_public_module(project, module) or (named.is_package and bool(named.public))
    if name in named.public and _is_public_module(project, module):
        return True
    definer = project.definer(module, name)
    return any(
        name in project.modules[folder].public and project.definer(folder, name) in (definer, folder)
        for folder in _folders_above(project, module)
    )


def _is_public_module(project: Project, module: str) -> bool:
    """Return whether each package on the way to a module lists the next part of its name."""
    above, _, last = module.rpartition(".")
    if not above:
        return True
    return above in project.modules and last in project.modules[above].public and _is_public_module(project, above)


def _folders_above(project: Project, module: str) -> list[str]:
    """Return the packages on the way to a module, itself included if it is one."""
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return [name for name in names if name in project.modules and project.modules[name].is_package]


def _full_name(item: Import) -> str:
    return f"{item.module}.{item.name}" if item.name else item.module
