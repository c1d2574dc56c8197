"""`specjax train`: the commands that train drafters."""

from specjax.cli.train_data import DATA_HELP, SHOW_HELP, Data, Show
from specjax.cli.train_run import EVAL_HELP, RUN_HELP, Eval, Run

HELP = """Train drafters on what their target says.

  specjax train data --target smollm2-135m --out corpus --tokens 300000   the target writes a corpus
  specjax train show corpus --dialogues 3                                 what is in it
  specjax train run --drafter eagle3 --corpus corpus --out run --minutes 30   a drafter learns from it
  specjax train eval run --corpus corpus                                  how long its drafts are accepted
  specjax train COMMAND --help                                            flags and examples of a command"""

COMMANDS = {
    "data": (Data, DATA_HELP),
    "show": (Show, SHOW_HELP),
    "run": (Run, RUN_HELP),
    "eval": (Eval, EVAL_HELP),
}
