"""Send an unlearned model to the Hugging Face Hub, with a card that says what was done to it.

    msa-lite publish runs/my-request alice/my-model --dry-run      # first: the card, and the files that would go
    python examples/publish.py runs/my-request alice/my-model

Nobody is asked here. The repository is private unless you say `--public`. The token is HF_TOKEN or that of `hf auth
login`. Vectors, rows, records and logs never go.
"""

import argparse

import msa_lite

parser = argparse.ArgumentParser(description="Publish an unlearned model.")
parser.add_argument("folder", help="a run's folder, or that of a merged model or adapter")
parser.add_argument("repo", help="ACCOUNT/NAME")
parser.add_argument("--public", action="store_true", help="let everybody see it")
parser.add_argument("--license", help="the licence, where the target's card names none")
arguments = parser.parse_args()

options = msa_lite.PublishOptions(public=arguments.public, license=arguments.license)
published = msa_lite.push_folder(arguments.folder, arguments.repo, options)

print(f"{published.kind}: {published.url} ({'private' if published.private else 'public'}, commit {published.commit})")
if not published.changed:
    print("it was there already")
if published.new_version:
    print(f"for the card of the old model, to lead its readers here: new_version: {published.new_version}")
