"""The ``polyhvdrun`` command: reads the command line, runs a job."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import resource
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from polyhvd.launch.cli.options import (
    ELASTIC_OPTIONS,
    SETTINGS,
    USAGE_STATUS,
    Parser,
    interface_of,
    is_one_of_several,
    make_parser,
    parse,
    print_version,
    take_ranks_per_node,
)
from polyhvd.launch.elastic.driven import Elastic
from polyhvd.launch.hosts.lists import Host, parse_hostfile, parse_hosts, place
from polyhvd.launch.job.job import Job, JobSpec
from polyhvd.launch.job.output import STDERR, STDOUT, Output
from polyhvd.launch.job.policy import LetOthersFinish, StopAtFirstFailure
from polyhvd.launch.job.programs import Part, Program, lay_out
from polyhvd.launch.job.spec import working_directory
from polyhvd.launch.providers.ssh import SshAgents, SshOptions
from polyhvd.observe.terminal import until_output_fails

if TYPE_CHECKING:
    from polyhvd.launch.providers.allocation import Allocation

__all__ = ["main"]

_INTERRUPTED_STATUS = 130
_SETTING_PREFIXES = ("POLYHVD_", "HOROVOD_")
_TEES = {0: (), 1: (STDOUT,), 2: (STDERR,), 3: (STDOUT, STDERR)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``polyhvdrun`` and return its exit status; the first failing rank's, if one fails."""
    _open_standard_streams()
    with until_output_fails("polyhvdrun"):
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    gc.freeze()  # what was imported is not garbage: not now, and not at the end, which it would prolong
    parser = make_parser()
    programs = parse(parser, arguments)
    options = programs[0]
    if options.print_completion:
        return _print_completion(parser, options.print_completion)
    if options.check:
        from polyhvd.launch.hosts.doctor import report  # looks at far more than a job needs

        print("\n".join(report()))
        return 0
    if not options.command:
        if (sys.argv[1:] if arguments is None else list(arguments)) == ["-v"]:
            print_version()
            return 0
        parser.error("no command to run, such as: polyhvdrun -np 2 python train.py")
    _raise_descriptor_limit()
    try:
        _take_config_file(options)
        if is_one_of_several(options):
            from polyhvd.launch.job import nodes

            return nodes.run(programs, _spec, _output)
        take_ranks_per_node(programs)
        spec = _spec(programs)
        if options.mpi:
            return _become_mpirun(spec, options)
        if options.jsrun:
            return _become_jsrun(spec, options)
        if options.mpi_args:
            print("polyhvdrun: --mpi-args has no effect without --mpi", file=sys.stderr, flush=True)
        if options.binding_args:
            text = "--binding-args has no effect without --mpi or --jsrun"
            print(f"polyhvdrun: {text}", file=sys.stderr, flush=True)
        if options.dry_run:
            from polyhvd.launch.cli.dry_run import plan

            print("\n".join(plan(spec)))
            return 0
        _warn_of_other_containers(options)
        output = _output(options, len(spec.placements) or (spec.elastic.limits.size if spec.elastic else 0))
    except BrokenPipeError:  # of a plan or a command line that was printed
        raise
    except (ValueError, OSError) as error:
        parser.exit(USAGE_STATUS, f"polyhvdrun: {error}\n")
    with contextlib.closing(output):
        return _run(spec, output, options.max_restarts)


def _output(options: argparse.Namespace, size: int) -> Output:
    try:
        return Output(
            size,
            tag=not options.no_tag,
            timestamps=options.timestamps,
            directory=options.output_filename,
            copied=_TEES[3 if options.tee is None else options.tee],
        )
    except OSError as error:
        raise ValueError(
            f"--output-filename {options.output_filename}: {error.filename}: {error.strerror}"
        ) from None


def _warn_of_other_containers(options: argparse.Namespace) -> None:
    """Warn in one of several containers of SageMaker's, which this job leaves out."""
    base = os.environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml"
    has_list = "SM_HOSTS" in os.environ or os.path.exists(f"{base}/input/config/resourceconfig.json")
    if options.hosts is not None or options.hostfile is not None or not has_list:
        return
    from polyhvd.launch import sagemaker

    found = sagemaker.find_container(os.environ)
    if found is not None and len(found[0].hosts) > 1:
        print(
            f"polyhvdrun: this job uses only {found[0].current}, one of the containers "
            f"{', '.join(found[0].hosts)}; start polyhvdrun --sagemaker in each of them for a job on all",
            file=sys.stderr,
            flush=True,
        )


def _run(spec: JobSpec, output: Output, restarts_max: int) -> int:
    """Run the job, and restart it when it has failed, unless a signal has ended it."""
    restarts, before = 0, int(spec.env.get("POLYHVD_RESTART_COUNT", "0"))  # by the batch system
    while True:
        env = {**spec.env, "POLYHVD_RESTART_COUNT": str(before + restarts)} if restarts_max else spec.env
        try:
            with Job(replace(spec, env=env), output) as job:
                status = job.run()
        except (ValueError, OSError) as error:
            output.report(str(error), alarm=True)
            return 1
        except KeyboardInterrupt:
            return _INTERRUPTED_STATUS
        cause = job.cause
        if cause is None or cause.unstartable or job.signalled or restarts == restarts_max:
            return status
        restarts += 1
        output.report(f"rank {cause.rank} has failed: restart {restarts} of {restarts_max}")
        output.forget()


def _print_completion(parser: Parser, shell: str) -> int:
    from polyhvd.launch.cli.completion import completion

    try:
        print(completion(parser, shell))
    except ImportError:
        parser.error("--print-completion needs shtab: pip install 'polyhvd[launcher]'")
    except ValueError as error:
        parser.error(f"--print-completion {shell}: {error}")
    return 0


def _become_mpirun(spec: JobSpec, options: argparse.Namespace) -> int:
    """Run MPI's launcher in this process's place."""
    from polyhvd.launch.providers.mpirun import find_launcher

    if spec.programs:
        raise ValueError("':' is not for --mpi; give mpirun itself several programs")
    _refuse_what_others_do(options, "--mpi", "--mpi-args")
    launcher = find_launcher()
    extra = [*shlex.split(options.binding_args), *shlex.split(options.mpi_args)]
    if launcher.open_mpi:  # of the others all variables of this process are passed on
        ours = [name for name in spec.env if not name.startswith(("POLYHVD_", "HOROVOD_"))]
        extra = [word for name in ours for word in ("-x", name)] + extra
    ssh = _ssh(options)
    words, env = launcher.command(spec.argv, spec.hosts, len(spec.placements), spec.env, ssh, extra)
    if options.dry_run:
        from polyhvd.launch.cli.dry_run import hide_secrets

        print(shlex.join(hide_secrets(words)))
        return 0
    if options.verbose:
        print(f"polyhvdrun: {shlex.join(words)}", file=sys.stderr, flush=True)
    os.execve(words[0], words, env)


def _refuse_what_others_do(options: argparse.Namespace, launcher: str, passed_on: str) -> None:
    """Raise ValueError if an option is for this process, in whose place another launcher will run."""
    own = f"give its launcher's own option with {passed_on}"
    refused = {
        "--output-filename": (options.output_filename, own),
        "--prefix-output-with-timestamp": (options.timestamps, own),
        "--keep-going": (options.keep_going, "its launcher ends a job in another way"),
        "--max-restarts": (options.max_restarts, "its launcher ends the job itself"),
        "--metrics-port": (options.metrics_port is not None, "its launcher receives no metrics"),
    }
    for name, (given, reason) in refused.items():
        if given:
            raise ValueError(f"{name} is not for {launcher}: {reason}")


def _become_jsrun(spec: JobSpec, options: argparse.Namespace) -> int:
    """Run jsrun in this process's place."""
    from polyhvd.launch.providers.lsf_agents import jsrun_command, jsrun_path

    if spec.programs:
        raise ValueError("':' is not for --jsrun; it takes several programs from a rankfile, --erf_input")
    _refuse_what_others_do(options, "--jsrun", "--binding-args")
    if options.mpi_args:
        print("polyhvdrun: --mpi-args has no effect with --jsrun", file=sys.stderr, flush=True)
    env = {**spec.env, **_variables(options)}
    words = jsrun_command(spec.argv, spec.placements, env, shlex.split(options.binding_args))
    if options.dry_run:
        from polyhvd.launch.cli.dry_run import hide_secrets

        print(shlex.join(hide_secrets(words)))
        return 0
    if options.verbose:
        print(f"polyhvdrun: {shlex.join(words)}", file=sys.stderr, flush=True)
    os.execv(jsrun_path(), words)


def _take_config_file(options: argparse.Namespace) -> None:
    """Take options from the file that the command line does not have."""
    if options.config_file is None:
        return
    from polyhvd.launch.cli.config_file import read

    settings = read(
        options.config_file, lambda line: print(f"polyhvdrun: {line}", file=sys.stderr, flush=True)
    )
    controller = settings.pop("controller", "")
    options.mpi = options.mpi or (controller == "mpi" and not options.gloo)
    for variable, value in settings.items():
        if getattr(options, variable) is None:
            setattr(options, variable, value)


def _spec(programs: list[argparse.Namespace]) -> JobSpec:
    options = programs[0]
    _check(options)
    working_directory()
    size, hosts, allocation = _size(programs), _hosts(options, options.slots_per_host), _allocation(programs)
    if options.jsrun:
        from polyhvd.launch.providers.lsf_agents import hosts_of_jsrun

        hosts = hosts_of_jsrun(allocation, size, options.slots_per_host)
    elif allocation is not None:
        hosts = allocation.sized(size, options.slots_per_host)
    elastic = _elastic(programs, hosts)
    laid_out: list[Program] = []
    if elastic is not None:
        hosts, placements, variables = elastic.hosts, [], _variables(options)
    elif len(programs) == 1:
        hosts = hosts or [Host("localhost", options.slots_per_host or size or 1)]
        placements, variables = place(hosts, size), _variables(options)
    else:
        parts = [
            Part(_argv(part), part.num_proc, _hosts(part, options.slots_per_host), _variables(part))
            for part in programs
        ]
        parts[0] = replace(parts[0], hosts=hosts)
        hosts, placements, laid_out = lay_out(parts)
        variables = {}
    spec = JobSpec(
        argv=_argv(options),
        hosts=hosts,
        placements=placements,
        programs=laid_out,
        env={**_environment(options), **variables},
        interface=interface_of(options),
        remote=SshAgents(_ssh(options)),
        start_timeout_s=_start_timeout_s(options),
        check_hosts=not options.no_host_checks,
        term_grace_s=options.term_grace_s,
        policy=LetOthersFinish() if options.keep_going else StopAtFirstFailure(),
        elastic=elastic,
        verbose=options.verbose,
        metrics_port=options.metrics_port,
        metrics_address=options.metrics_address,
    )
    return spec if allocation is None else spec.within(allocation, options)


def _allocation(programs: list[argparse.Namespace]) -> Allocation | None:
    """The allocation of a batch system, if the user has named no hosts; raises ConfigError."""
    options = programs[0]
    named = any(part.hosts is not None or part.hostfile is not None for part in programs)
    if named or options.host_discovery_script is not None or is_one_of_several(options):
        return None
    if "SLURM_JOB_ID" not in os.environ and not os.environ.keys() & {"LSB_JOBID", "PBS_JOBID"}:
        return None  # without a look at files that a job elsewhere does not need
    from polyhvd.launch.providers import allocation

    return allocation.find(os.environ)


def _check(options: argparse.Namespace) -> None:
    """Check combinations of options; raises ValueError."""
    if options.start_timeout is not None and not 0 < options.start_timeout < float("inf"):
        raise ValueError(f"--start-timeout {options.start_timeout:g}: must be above 0")
    if not 0 <= options.term_grace_s < float("inf"):
        raise ValueError(f"--term-grace-s {options.term_grace_s:g}: must not be negative")
    if options.tee and not options.output_filename:
        raise ValueError(f"--tee {options.tee}: there is no folder to write to; give --output-filename DIR")


def _elastic(programs: list[argparse.Namespace], hosts: list[Host] | None) -> Elastic | None:
    """The settings of an elastic job in the options; None: it is not elastic. Raises ValueError."""
    if not any(getattr(programs[0], name) is not None for name in ELASTIC_OPTIONS):
        return None
    from polyhvd.launch.cli.elastic_options import elastic_of  # no other job needs it

    return elastic_of(programs, hosts)


def _size(programs: list[argparse.Namespace]) -> int | None:
    """The number of ranks, if it is given."""
    size: int | None = programs[0].num_proc if len(programs) == 1 else sum(part.num_proc for part in programs)
    return size


def _hosts(options: argparse.Namespace, slots: int | None) -> list[Host] | None:
    """The hosts that were named; one without a number has so many slots."""
    if options.hosts is not None:
        return parse_hosts(options.hosts, slots or 1)
    return parse_hostfile(options.hostfile, slots or 1) if options.hostfile is not None else None


def _argv(options: argparse.Namespace) -> list[str]:
    return [sys.executable, "-m", *options.command] if options.module else list(options.command)


def _variables(options: argparse.Namespace) -> dict[str, str]:
    """The variables of -x; raises ValueError for one that is not set here."""
    variables = {}
    for name, value in options.variables:
        if value is None and name not in os.environ:
            raise ValueError(f"-x {name}: polyhvdrun has no such variable to pass on; give -x {name}=VALUE")
        variables[name] = os.environ[name] if value is None else value
    return variables


def _ssh(options: argparse.Namespace) -> SshOptions:
    return SshOptions(
        port=options.ssh_port,
        identity_file=options.ssh_identity_file,
        options=tuple(options.ssh_option),
        python=options.remote_python,
        connect_timeout_s=_start_timeout_s(options),
    )


def _start_timeout_s(options: argparse.Namespace) -> float:
    """The value of the option, or else of the variable, which ranks read as well; raises ConfigError."""
    if options.start_timeout is not None:
        return float(options.start_timeout)
    if not os.environ.keys() & {"POLYHVD_START_TIMEOUT", "HOROVOD_START_TIMEOUT"}:
        return 30.0
    from polyhvd.config import Settings

    return Settings.from_environment(os.environ).start_timeout_s or 30.0


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """The variables of all ranks that options set; raises ConfigError where a rank would."""
    env = {}
    if options.start_timeout is not None:
        env["POLYHVD_START_TIMEOUT"] = f"{options.start_timeout:g}"
    if options.network_interface:
        env["POLYHVD_GLOO_IFACE"] = interface_of(options)
    if options.tcp:
        env["NCCL_IB_DISABLE"] = "1"
    if options.huge_pages:
        env["THP_MEM_ALLOC_ENABLE"] = "1"
    return env | _settings(options)


def _settings(options: argparse.Namespace) -> dict[str, str]:
    values = {variable: getattr(options, variable) for variable, _, _ in SETTINGS.values()}
    given = {variable: value for variable, value in values.items() if value is not None}
    if "FUSION_THRESHOLD" in given:
        try:
            given["FUSION_THRESHOLD"] = str(round(float(given["FUSION_THRESHOLD"]) * (1 << 20)))
        except (ValueError, OverflowError):
            raise ValueError(
                f"--fusion-threshold-mb {given['FUSION_THRESHOLD']}: expected a number"
            ) from None
    env = {f"POLYHVD_{name}": value for name, value in given.items()}
    inherited = {name: value for name, value in os.environ.items() if name.startswith(_SETTING_PREFIXES)}
    if env or inherited:
        from polyhvd.config import Settings  # takes long to import

        Settings.from_environment(inherited | env)
    return env


def _open_standard_streams() -> None:
    """Open the null device for each closed standard stream, so that no socket gets its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def _raise_descriptor_limit() -> None:
    """Each rank holds a few of our descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
