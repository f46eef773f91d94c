"""Define the part of a recipe about the repository on the Hub that its model is sent to."""

from __future__ import annotations

from pydantic import model_validator

from msa_lite.recipe.inputs import Closed


class Publish(Closed):
    """The repository on the Hugging Face Hub that the run sends its model or adapter to at its end.

    No part of this decides a result.
    """

    repo: str | None = None
    """ACCOUNT/NAME, or NAME for the account of the token. null: nothing is sent. A verdict of FAIL is not sent either,
    unless it is accepted (`--accept`, or `verdict: off`)."""
    private: bool = True
    """true: only its owner sees it. false: everybody does."""
    gated: bool = False
    """true: readers must ask for access."""
    license: str | None = None
    """The licence's identifier, such as apache-2.0, for a target whose card names none."""
    name_models: bool = False
    """true: the card may name models that are private, or that the Hub does not know."""

    @model_validator(mode="after")
    def _needs_a_repository(self) -> Publish:
        if self.repo is None and self != Publish.model_construct():
            raise ValueError("settings without a repo to send to; give publish.repo, or leave publish out")
        return self
