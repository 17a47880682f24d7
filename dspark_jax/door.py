"""What the command-line doors share: config flags, and errors that are one line and exit code 2."""

import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from dspark_jax.errors import UserError, is_full


def run_door(main: Callable[[], None]) -> None:
    """Runs `main`; a UserError becomes one line on stderr and exit code 2, Ctrl-C exit code 130.

    Compiled programs are kept for the next start on this host, unless JAX's own variable says where or, empty, not to.
    """
    programs = Path.home() / ".cache" / "dspark_jax" / "programs" / platform.node()
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(programs))
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(f"\n{stop}" if str(stop) else "\ninterrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except (PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError) as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if not is_full(error):
            raise
        print(f"error: {error.filename or 'a file'} cannot be written: the disk is full", file=sys.stderr)
        sys.exit(2)


def parse_config(
    argv: list[str], define: Callable[[flags.FlagValues], None] = lambda values: None, required: bool = True
) -> tuple[ConfigDict | None, flags.FlagValues]:
    """Reads `--config=FILE`, `--config.section.key=value` overrides and the flags that `define` adds.

    The config is None only where it is not `required`. Raises UserError on a missing config file, an unknown key or
    flag, and a value of the wrong type.
    """
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "path of a config file", flag_values=values)
    define(values)
    if any(arg in ("--help", "-h") for arg in argv[1:]):
        print(values.main_module_help() or values.get_help())
        sys.exit(0)
    try:
        rest = values(argv)
        config = values.config
        if config is not None:
            config.keys()  # a config file that does not load reports itself at first use
    except KeyError as error:
        raise UserError(
            f"unknown config key {' '.join(str(error.args[0]).split())} The keys are in configs/base.py"
        ) from None
    except Exception as error:  # a config file is Python: anything may come out of it
        raise UserError(_reason(error)) from None
    if len(rest) > 1:
        raise UserError(f"unexpected argument {rest[1]!r}: options are written --name=value")
    if config is None and required:
        raise UserError("which config? give --config=configs/smollm2_135m.py")
    return config, values


def define_json(values: flags.FlagValues) -> None:
    """`--json=FILE`, refused at once, not after minutes of work, when it cannot be written there."""
    flags.DEFINE_string("json", None, "file for the results as JSON", flag_values=values)

    def has_folder(path: str | None) -> bool:
        return path is None or (Path(path).absolute().parent.is_dir() and not Path(path).is_dir())

    flags.register_validator("json", has_folder, "it must be a file in a folder that exists", flag_values=values)


def _reason(error: Exception) -> str:
    """The line of a flags error that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = error.__cause__ or error.__context__
    if isinstance(error, OSError) and "Failed loading config file" in str(error):
        return f"cannot load the config file: {lines[-1]}"
    if cause is not None and not lines:
        return str(cause)
    return lines[-1] if lines else repr(error)
