"""List the attacks by name, in the order in which they run, with all facts that are needed before one is loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttackEntry:
    """One attack. All else about it is in the class that implements it."""

    implementation: str
    """Dotted name of its class, a `msa_lite.attacks.attack.Attack`."""
    summary: str
    """Half a sentence for help texts and reports: what somebody does to get the rows back."""
    words: str
    """Its name for somebody who knows nothing of attacks; with `leak`, a clause."""
    leak: str = "bring the rows back"
    """The rest of that clause, of an attack that succeeds."""


ATTACKS: dict[str, AttackEntry] = {
    "membership": AttackEntry(
        "msa_lite.attacks.membership.Membership",
        "tell from its losses that a model was trained on the rows",
        "losses",
        "tell the rows apart",
    ),
    "prompt": AttackEntry(
        "msa_lite.attacks.prompt.Prompting",
        "ask in other words, with examples, with the first words of the answer",
        "other prompts",
    ),
    "sample": AttackEntry(
        "msa_lite.attacks.sample.Sample", "draw many answers at random, and look at the best", "many samples"
    ),
    "quantise": AttackEntry(
        "msa_lite.attacks.quantise.Quantise", "round the weights to 8 or 4 bits", "rounded weights"
    ),
    "relearn": AttackEntry(
        "msa_lite.attacks.relearn.Relearn",
        "train a little on a part of the rows, or on others",
        "more training",
        "brings the rows back",
    ),
    "depth": AttackEntry(
        "msa_lite.attacks.depth.Depth",
        "read the rows from inner layers, by activation patching",
        "inner layers",
        "still hold the rows",
    ),
}
