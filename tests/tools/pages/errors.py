"""The page of errors: the classes as the code has them, and the commonest messages with their causes and fixes.

Each message stands here as the code has it, with … for what it fills in; `missing_messages` names those that no module
holds any more.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache

from msa_lite import errors
from msa_lite.errors import MsaError
from tests.tools.arrows import sources
from tests.tools.pages.tables import code, table

Message = tuple[str, str, str]  # the message, its cause, what to do

_HEADER = """# Errors

Written by `python -m tests.tools.pages`. A test checks that each message below stands in the code.

An error is one message on stderr that starts with `error:`. It says what is wrong, where, and what to try. One message
reports all faults. `-v` adds the traceback.

Checks come before any work, so exit code 3 leaves no files, with two exceptions. A LoRA adapter as target or prior is
already merged. The scores of the check before the fits stay in `evaluation/` for the next run; they hold the rows, and
`msa-lite purge` removes them.

## Classes and exit codes

In Python, catch `msa_lite.errors.MsaError`, or one of its classes.

"""
GROUPS: dict[str, tuple[Message, ...]] = {
    "Wrong usage": (
        (
            "'…' is neither a command nor a recipe (a .yaml file, or a shipped one)…",
            "A typo in the command's name, or the recipe is not in this folder.",
            "`msa-lite --help` lists the commands, `msa-lite recipes list` the shipped recipes.",
        ),
        (
            "no such file: … (looked in the folder …); …",
            "A typo in the name of your recipe, or another working folder.",
            "The message names the folder, and files there with such a name.",
        ),
        (
            "…: pip install …",
            "This command needs packages, such as torch, that the plain installation lacks.",
            "Run this command: it installs what is missing from where msa-lite came.",
        ),
        (
            "…: no such folder, and it could not be fetched from the Hub (…)",
            "A typo in the path, a private or gated repository, or no network.",
            "Check the name. Log in with `hf auth login`. Paths in a recipe start from its folder, else from the "
            "working folder.",
        ),
        (
            "'…': an override is key.sub=value",
            "The shell interpreted a blank or a bracket.",
            "Put the override in quotes: `'forget.alpha=[0.5, 1]'`.",
        ),
        (
            "--retain is given, but no --beta; say how strongly it counts, e.g. --beta 1.0",
            "`merge` has no default for β.",
            "Add `--beta`.",
        ),
    ),
    "A recipe with faults": (
        (
            "unknown key…",
            "A typo in a key, or a key in the wrong section.",
            "See [the keys](recipe.md). The message names the nearest key.",
        ),
        (
            "is missing, and so is a prior. Name the prior, or a history from which it is chosen; or give retain.data: "
            "without a prior the vectors are fitted from the target, and their filter needs such rows",
            "The recipe has neither `prior` nor `history`, and no rows to keep.",
            "Name the model that you fine-tuned, or see [No prior at all](../how-to/choose-prior.md#no-prior-at-all).",
        ),
        (
            "evaluate.holdout: without a prior or an ideal, there is no control for the verdict; give "
            "evaluate.holdout, similar rows that no model has learnt",
            "The recipe has neither `prior` nor `history`, and no other control.",
            "Give similar rows that no model has learnt, or an ideal.",
        ),
        (
            "…: is the recipe of …; `msa-lite …` takes it",
            "A training's recipe was given to `run`, or a run's to `train`.",
            "Use the command in the message.",
        ),
    ),
    "Data": (
        (
            "…: no column ……; there are …. Name them in `columns`, as …",
            "The columns have other names than `question` and `answer`, and no form that msa-lite knows.",
            "Name the columns: `columns: {question: q, answer: a}`.",
        ),
        (
            "…: the data set is empty",
            "The file has no row, or `data.split` names the wrong split.",
            "Look at the file; set `data.split`.",
        ),
        (
            "…: cells without text; correct them, or take the rows out:",
            "A question, an answer or a message is empty, `null`, no text, or out of turn. Each line names a row.",
            "Fill it in, or remove the row. A row without an answer has nothing to forget.",
        ),
        (
            "…: is UTF-16, which is not read; …",
            'Excel\'s "Unicode Text" is UTF-16.',
            "Save the file as UTF-8, as with the command in the message.",
        ),
        (
            "… of … rows call tools, which …; take these rows out, or leave only question and answer in them",
            "The target's chat template, or a plain prompt, leaves calls or their results out.",
            "Remove the rows, or name a `tokenizer` whose chat template shows calls.",
        ),
        (
            "…: which split? There are …; set data.split in the recipe",
            "The data set has several splits and none is called `train`.",
            "Set `data.split`.",
        ),
        (
            "…: nothing is left to learn after cutting to max_length=…; raise it",
            "The prompts alone fill `vector.max_length`.",
            "Raise `vector.max_length`.",
        ),
    ),
    "Target and prior": (
        (
            "it is hardly better on them than the prior: …",
            "The prompt differs from that of the training, or the rows or the model are wrong.",
            "Set `prompt:`. The message names the form in which the target knows the rows, if there is one.",
        ),
        (
            "it is hardly better on them than on the holdout rows, which it was not trained on",
            "The target answers questions of this kind, but was not trained on these rows.",
            "Check the rows.",
        ),
        (
            "the prior … has already seen the rows to forget, so their vector would miss them: …",
            "The prior was saved after the rows came in.",
            "Take an earlier checkpoint. `msa-lite probe` compares some.",
        ),
        (
            "target … and … … do not fit, so it cannot be its prior:",
            "Names or shapes of tensors differ: another architecture or size.",
            "Name the model that the target was tuned from.",
        ),
        (
            "the tokenizers of target … and prior … read the forget rows differently",
            "The fine-tune changed the tokenizer, or the prior is another model.",
            "Name the checkpoint that the target was tuned from.",
        ),
        (
            "target …: was saved without a tokenizer, and so was the prior",
            "`model.save_pretrained` alone writes no tokenizer.",
            "Copy the tokenizer's files into the target's folder.",
        ),
        (
            "prompt.kind is 'chat', but the target's tokenizer has no chat template; use 'plain'",
            "The target is not a chat model, or was saved without its template.",
            "Use `prompt: plain`, or copy the template into the target's folder.",
        ),
    ),
    "A merge": (
        (
            "…: does not fit the target (is it an adapter for another model?)",
            "The adapter names modules or shapes that the target does not have.",
            "Use the target that the adapter was made for.",
        ),
        (
            "…: the target ties embedding and head, but …, so the change of the one matrix is not defined; give each "
            "use a matrix of its own with msa_lite.merge(…, untie=True)",
            "The adapter changes only one use of the matrix, or each differently.",
            "With `untie=True`, the result has two matrices.",
        ),
        (
            "…: its head is missing (lm_head.weight), and config.json says tie_word_embeddings: false, so it would be "
            "loaded with a random head; …",
            "The index does not name the shard of the head, or the model was saved without it.",
            "Add it to the index, or save the model again.",
        ),
        (
            "…: … of its tensors are empty. …:",
            "DeepSpeed's ZeRO-3 saved the weights without gathering them.",
            "Save again with `zero3_save_16bit_model`, or run `zero_to_fp32.py` in the training's checkpoint.",
        ),
        (
            "…: this is a full checkpoint; name the model that it was tuned from (--prior)",
            "A checkpoint holds new values, not changes.",
            "Add `--prior`.",
        ),
        (
            "…: the vectors change none of the … weights they touch: they are too small for this dtype…; nothing was "
            "written",
            "bfloat16 has too few digits for so small an update.",
            "`--dtype float32`, `--as adapter`, or `--rounding stochastic`.",
        ),
        (
            "…: the target is quantised in a form that is not read here (quantization_config: …)",
            "msa-lite cannot read the codes of GPTQ, AWQ, HQQ and others as weights.",
            "Merge into the unquantised model, then quantise the result.",
        ),
        (
            "…: the target is stored in …, in which no update can be stored",
            "The steps of bitsandbytes' 4 and 8 bits are larger than most updates.",
            "`--dtype bfloat16` writes a plain model; `--as adapter` writes the update alone.",
        ),
        (
            "…: no …; pickled adapters are not read, save it as safetensors",
            "Pickled files can run code, so msa-lite never loads them.",
            "Save the adapter as safetensors.",
        ),
        (
            "… of memory is too little: this merge needs at least …MB",
            "`--max-memory` is smaller than the vectors' factors.",
            "Give `--max-memory` at least that.",
        ),
    ),
    "The output folder": (
        (
            "…: holds something that is no run of msa-lite; choose another output",
            "`output` is your own folder.",
            "Choose another `output`. msa-lite never replaces your files.",
        ),
        (
            "…: another msa-lite is working in it; wait until it is done",
            "Two commands have the same output.",
            "Wait, or choose another `output`.",
        ),
        (
            "…: … are needed, … are free on that disk; make room or choose another output folder",
            "The disk is too small for the result.",
            "Make room, or write to another disk.",
        ),
        (
            "…: cannot be written (…); choose another place",
            "The place is read-only, lies below a file, or has a name that the system does not take.",
            "Choose a folder of your own.",
        ),
        (
            "…: its data was purged, and a run would fit the vectors again and write the rows down again",
            "`msa-lite purge --yes` ran on this folder.",
            "Choose another `output`.",
        ),
    ),
    "While it works": (
        (
            "…: out of memory, … (…): …; the longest row has … tokens. Try …",
            "Even one row at a time does not fit into the GPU.",
            "Do what the message says, or see [On one consumer GPU](../tutorials/consumer-gpu.md).",
        ),
        (
            "…: the loss rose, or was no number, at a learning rate of …; nothing was kept. Try a lower learning_rate",
            "The learning rate is too high for this model.",
            "Lower `vector.learning_rate`, or leave it at `auto`.",
        ),
        (
            "the judge failed: …. … of … answers are kept in …; a rerun asks only for the rest",
            "The server refused, or gave no answer in time.",
            "See the reason in the message; then run the same command again.",
        ),
        (
            "… (the disk is full, or a limit on it is reached; make room); …",
            "The disk filled up during the work.",
            "Make room and run the same command again: finished stages stay.",
        ),
        (
            "… (this was not expected and may be a bug); …",
            "msa-lite does not know this error.",
            "Run it again with `-v`, and report the traceback.",
        ),
    ),
}


def errors_page() -> str:
    """Return the page of errors."""
    classes = [(code(kind.__name__), str(kind.exit_code), _meaning(kind)) for kind in _classes()]
    parts = [_HEADER + table(("class", "exit code", "when"), classes)]
    for heading, messages in GROUPS.items():
        rows = [(code(message), cause, fix) for message, cause, fix in messages]
        parts.append(f"## {heading}\n\n" + table(("message", "cause", "what to do"), rows))
    return "\n".join(parts)


def _classes() -> list[type[MsaError]]:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, MsaError)]
    return sorted(kinds, key=lambda kind: (kind is not MsaError, kind.exit_code, kind.__name__))


def _meaning(kind: type[MsaError]) -> str:
    return " ".join((inspect.getdoc(kind) or "").split())


def missing_messages(messages: list[str]) -> list[str]:
    """Return the messages that no string of the package's source holds, … standing for any value."""
    texts = "\n".join(source_texts())
    return [message for message in messages if message not in texts]


@cache
def source_texts() -> frozenset[str]:
    """Return every string of the package's source, joined as Python joins it, with … for what is filled in."""
    return frozenset(_source_texts())


def _source_texts() -> Iterator[str]:
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
