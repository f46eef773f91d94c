# msa-lite in a container, for CPU or GPU.
#
#     docker build -t msa-lite .
#     docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" -v "$HOME/.cache/huggingface:/cache/huggingface" \
#         msa-lite recipes list
#
# For a GPU, PyTorch's usual wheels bring their CUDA libraries along. The host needs NVIDIA's driver and container toolkit:
#
#     docker build --build-arg EXTRAS=qlora -t msa-lite:gpu .
#     docker run --rm --gpus all --user "$(id -u):$(id -g)" -v "$PWD:/work" -v "$HOME/.cache/huggingface:/cache/huggingface" \
#         msa-lite:gpu plan my-request.yaml
#
# BASE=IMAGE builds on another Debian or Ubuntu, such as one of NVIDIA's with CUDA; Python is added where it is missing,
# and has to be 3.11 or newer there. TORCH_INDEX=ADDRESS takes PyTorch from another index, such as that of its CPU wheels,
# which makes the image several GB smaller. The usual variables of pip for indexes may be given as build arguments, too.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# OpenSSH signs removal records. The versions of packages are those of the base image, whatever it is.
# hadolint ignore=DL3008,SC2086
RUN python="$(python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3 python3-venv)" \
    && apt-get update \
    && apt-get install -y --no-install-recommends openssh-client $python \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv \
    && useradd --no-create-home --home-dir /cache --uid 10001 msa \
    && install -d -m 1777 /work /cache /cache/huggingface

# Whoever the container runs as may write to /cache, so that --user works.
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/cache \
    HF_HOME=/cache/huggingface \
    PYTHONUNBUFFERED=1

ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ARG TORCH=2.13.0
ARG TORCH_INDEX
RUN PIP_INDEX_URL="${TORCH_INDEX:-$PIP_INDEX_URL}" pip install --no-cache-dir "torch==${TORCH}"

# The dependencies, by way of an empty package: this layer is made anew only when pyproject.toml changes, which bounds
# their versions.
WORKDIR /opt/msa-lite
ARG EXTRAS=train
COPY pyproject.toml ./
# hadolint ignore=DL3013
RUN mkdir msa_lite recipes \
    && touch msa_lite/__init__.py README.md LICENSE \
    && pip install --no-cache-dir ".${EXTRAS:+[$EXTRAS]}"

COPY . .
RUN pip install --no-cache-dir --no-deps --force-reinstall .

USER 10001
WORKDIR /work
ENTRYPOINT ["msa-lite"]
CMD ["--help"]
