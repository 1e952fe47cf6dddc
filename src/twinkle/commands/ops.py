"""``twinkle-kernel ops``: the operators of the ATen level, and the checks of the three levels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from twinkle.commands.console import CommandError, print_json, progress, show, stdout
from twinkle.layout import EMPTY_LINE, Block, paragraph, table
from twinkle.reasons import Reason, did_you_mean


def list_operators(*, as_json: bool) -> int:
    """Prints operators × platforms × state; the exit code is 0."""
    facts = operator_facts()
    if as_json:
        print_json(facts)
    else:
        console = stdout()
        show(console, _list_blocks(facts, console.width))
    return 0


def operator_facts() -> dict[str, Any]:
    """What is known about every operator on every platform.

    Returns:
        ``platforms``: name -> why it isn't here, or None. ``operators``: name -> ``schema``, ``error`` (why it can't be
        had, or None), ``by_design`` (why it is never registered, or None) and ``platforms``: name -> ``keys`` and
        ``level``, the latter None where the platform isn't here.
    """
    from twinkle.aten import RegistrationError, catalog
    from twinkle.aten.keys import effective_keys
    from twinkle.aten.serving import Serving
    from twinkle.platforms import PLATFORMS

    missing = {platform.name: platform.missing() for platform in PLATFORMS.values()}
    operators: dict[str, Any] = {}
    for name in catalog.names():
        try:
            spec = catalog.operator(name)
            overload = spec.overload
            levels = {p.name: Serving(spec, p).level for p in PLATFORMS.values() if missing[p.name] is None}
        except (
            Exception
        ) as error:  # whatever importing a kernel raises; the other operators are to be seen all the same
            said = (
                str(error)
                if isinstance(error, RegistrationError)
                else f"{name}: {Reason.of_error(error, 'bad-spec', 'loading it')}"
            )
            operators[name] = {"schema": None, "error": said, "by_design": None, "platforms": {}}
            continue
        operators[name] = {
            "schema": spec.schema,
            "error": None,
            "by_design": spec.by_design,
            "platforms": {
                platform.name: {
                    "keys": list(effective_keys(overload, platform)),
                    "level": levels.get(platform.name),
                }
                for platform in PLATFORMS.values()
            },
        }
    reasons = {name: None if reason is None else str(reason) for name, reason in missing.items()}
    return {"platforms": reasons, "operators": operators}


def _list_blocks(facts: dict[str, Any], width: int) -> Iterator[Block]:
    here = [name for name, reason in facts["platforms"].items() if reason is None]
    rows = [(name, *(_cell(found, platform) for platform in here)) for name, found in facts["operators"].items()]
    yield from table(("operator", *here), rows, width)
    yield Block(paragraph("what the kernel is written in, and the dispatch keys it is installed at", width), "dim")
    broken = [found["error"] for found in facts["operators"].values() if found["error"]]
    absent = [f"{name}: {reason}" for name, reason in facts["platforms"].items() if reason is not None]
    never = [f"{name}: {found['by_design']}" for name, found in facts["operators"].items() if found["by_design"]]
    for heading, lines in (("Not usable", broken), ("Never registered, by design", never), ("Not here", absent)):
        if lines:
            yield EMPTY_LINE
            yield Block([heading], "bold")
            yield from (Block(paragraph(line, width, indent=2)) for line in lines)


def _cell(found: dict[str, Any], platform: str) -> str:
    if found["error"]:
        return "-"
    on = found["platforms"][platform]
    if found["by_design"]:
        return f"{on['level']}, never registered"
    return f"{on['level']} at {', '.join(on['keys'])}"


ENGINES = ("transformers", "vllm")
"""What the framework level can run."""


def run(
    names: Sequence[str], *, level: str, engine: str, device: str, time_limit: float, report: bool, as_json: bool
) -> int:
    """Runs the checks and prints what they found.

    Returns:
        1 when a check failed, 3 when nothing could be run, else 0.

    Raises:
        CommandError: an unknown operator, level, engine or device profile, an unusable list of inputs or declaration of
            an operator, no time, or a package is missing.
    """
    if not time_limit > 0:
        raise CommandError(f"a time limit is a number of seconds above 0, not {time_limit:g}")
    specs, chip, chosen = _chosen(names, level, device)
    if engine not in ENGINES:
        raise CommandError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}{did_you_mean(engine, ENGINES)}")
    in_engine = engine == "vllm" and chosen.pop("framework", None) is not None
    from twinkle.aten import RegistrationError
    from twinkle.aten.harness.levels import as_table, exit_code
    from twinkle.aten.harness.listed import InputsError

    outcomes = []
    with progress(as_json) as bar:
        task = bar.add_task("", total=len(specs) * (len(chosen) + in_engine))
        for spec in specs:
            for name, check in chosen.items():
                bar.update(task, description=f"{spec.name}: {name} level")
                try:
                    outcomes.append(check(spec, chip, seconds=time_limit).to_dict())
                except (InputsError, RegistrationError) as error:
                    raise CommandError(str(error)) from error
                bar.advance(task)
        if in_engine:
            from twinkle.aten.harness import vllm_engine

            bar.update(task, description="all in vLLM: framework level")
            outcomes += [outcome.to_dict() for outcome in vllm_engine.run(specs, chip)]
            bar.advance(task, len(specs))
    if report:
        from twinkle.aten.harness.report import write

        for spec in specs:
            write(spec, chip, [outcome for outcome in outcomes if outcome["operator"] == spec.name])
    if as_json:
        print_json({"device": chip.name, "outcomes": outcomes})
    else:
        console = stdout()
        show(console, as_table(outcomes, console.width))
    return exit_code(outcomes)


def _chosen(names: Sequence[str], level: str, device: str) -> tuple[list[Any], Any, dict[str, Any]]:
    from twinkle.aten import RegistrationError, catalog, profile
    from twinkle.aten.harness.levels import LEVELS

    if level != "all" and level not in LEVELS:
        known = (*LEVELS, "all")
        raise CommandError(f"unknown level {level!r}; known: {', '.join(known)}{did_you_mean(level, known)}")
    try:
        specs = [catalog.operator(name) for name in catalog.chosen(names)]
        return specs, profile(device), dict(LEVELS) if level == "all" else {level: LEVELS[level]}
    except (RegistrationError, ValueError) as error:
        raise CommandError(str(error)) from error
    except ModuleNotFoundError as error:
        if error.name != "yaml":
            raise
        raise CommandError("device profiles need PyYAML: pip install 'twinkle-kernel[aten]'") from error


def new(name: str, *, schema: str | None, folder: str) -> int:
    """Makes an operator's package from the template and says what comes next; the exit code is 0.

    Raises:
        CommandError: no such operator, another schema, one that the template isn't for, or it is there already.
    """
    from pathlib import Path

    from twinkle.aten import RegistrationError, scaffold
    from twinkle.aten.shipped import shipped

    if not Path(folder).is_dir():
        raise CommandError(f"no folder {folder}: make it first, or run this where it is")
    try:
        overload = scaffold.overload_of(name, schema)
        scaffold.check_free(name)
        package = scaffold.make(overload, Path(folder))
    except RegistrationError as error:
        raise CommandError(str(error)) from error
    print(f"{package}: made. Check it:\n\n    python {package / 'example.py'} cpu\n")
    kernel = package / "kernel" / "torch_level.py"
    if not scaffold.is_taken_apart(overload):
        print(f"PyTorch takes {name} apart no further: its kernel is to be written, in {kernel}. Until then it calls")
        print("the operator itself, which the op level says of every call.\n")
    place = scaffold.Place.of(Path(folder))
    print(_listed(name, place))
    if (other := place.hidden_by()) is not None:
        print(f"{place.package} is found in {other} first, and {place.module(name)} with it: give your folder")
        print("another name before you install it.\n")
    print(f"What to write, and where: {shipped('template') / 'README.md'}")
    return 0


def _listed(name: str, place: Any) -> str:
    """Adds a new operator to its project, and tells what was done."""
    from twinkle.aten import RegistrationError, scaffold

    project, value = place.project, place.value(name)
    install = "That it is known everywhere:\n\n    pip install -e . --no-deps\n"
    if not project.is_file():
        entry = f'[project.entry-points."twinkle.aten_ops"]\n    {name} = "{value}"'
        return f"There is no {project}. The one of the package that will hold it needs:\n\n    {entry}\n"
    try:
        added = scaffold.add_entry_point(name, value, project)
    except RegistrationError as error:
        return f"{project} was not changed: {error.reason}\n"
    return f'{project} {"lists it now" if added else "listed it already"} ({name} = "{value}"). {install}'
