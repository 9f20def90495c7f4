"""Dependencies point one way: launch -> core <- adapters <- plugins. No framework in the core or in plugin modules."""

from __future__ import annotations

from tools.layout.project import CORE, Import, Module, Project

FRAMEWORKS = frozenset(("torch", "tensorflow", "keras", "jax", "horovod", "mpi4py"))
HEAVY = FRAMEWORKS | {"numpy"}
LAUNCHER = "unidist_launch"
SHARED_BY_ADAPTERS = ("unidist_arrays", "unidist_keras")
EXTEND_THE_LAUNCHER = frozenset(
    f"unidist_{name}"
    for name in (
        "bench",
        "data_service",
        "evaluator",
        "kubernetes",
        "mpi_launch",
        "pipeline",
        "planner",
        "ray",
        "slurm",
        "spark",
        "status",
        "track",
    )
)
"""Plugins that bring a launcher, commands or options, and may import what the launcher has for that."""


def check_directions(project: Project) -> list[str]:
    """Return each import that points the wrong way, or that costs too much where it stands."""
    return [
        f"{module.path}:{item.line}: imports {item.package}: {reason}"
        for module in project.modules.values()
        for item in _by_statement(module)
        if (reason := _objection(module, item, is_entry_module=module.name in project.entry_modules))
    ]


def _by_statement(module: Module) -> list[Import]:
    """Return one import of each package that a line names: `from a import b, c` is one mistake, not two."""
    return list({(item.line, item.package): item for item in module.imports}.values())


def _objection(module: Module, item: Import, *, is_entry_module: bool) -> str:
    """Return why the module must not have this import; "" if it may."""
    package = item.package
    is_ours_beside_the_core = package.startswith(f"{CORE}_")
    if is_entry_module and item.at_import and package in HEAVY:
        return "a module named by an entry point is loaded in every process; import this where it is used"
    if module.area == CORE and not module.is_facade:
        if package in FRAMEWORKS:
            return "the core knows no framework; go through unidist/framework.py"
        if is_ours_beside_the_core:
            return "the core knows no plugin; let it register what the core shall find"
    if module.area == "launch":
        if package in HEAVY:
            return "the launcher starts in milliseconds; leave this to the ranks"
        if is_ours_beside_the_core and package != module.package:
            return "the launcher knows the core alone; let plugins register what it shall find"
    if module.area == "adapters" and is_ours_beside_the_core and package not in (module.package, *SHARED_BY_ADAPTERS):
        return f"adapters know the core, and {' and '.join(SHARED_BY_ADAPTERS)} alone"
    if package == LAUNCHER and module.area != "launch" and module.package not in EXTEND_THE_LAUNCHER:
        return "only plugins that extend the launcher import it"
    return ""
