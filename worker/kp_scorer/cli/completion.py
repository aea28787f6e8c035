"""``kp-scorer completion``: print the script that lets a shell complete commands, options and files."""

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from kp_scorer.cli.output import print_text

_SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command(epilog="Example: kp-scorer completion bash > ~/.local/share/bash-completion/completions/kp-scorer")
@click.argument("shell", type=click.Choice(tuple(_SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script by which a shell completes what is typed after kp-scorer.

    To try it out: source <(kp-scorer completion bash), in zsh the same with zsh; in fish: kp-scorer completion fish | source.
    """
    root = context.find_root()
    name = root.info_name or "kp-scorer"
    print_text(_SHELLS[shell](root.command, {}, name, "_KP_SCORER_COMPLETE").source() + "\n")
