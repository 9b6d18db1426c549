# The course in a container, for an NVIDIA GPU or none:
#
#   docker build -t failurelab .
#   docker run --rm --gpus all -p 127.0.0.1:8888:8888 failurelab      # without a GPU: leave out --gpus all
#
# JupyterLab prints the address to open, with its token. Nothing that you change outlives --rm; see docs/ci.md.
#
# No CUDA image: torch's wheels bring CUDA's libraries, and the driver is the host's (NVIDIA Container Toolkit). No CUDA
# compiler: DeepSpeed up to 0.16 wants one when it is imported for GPUs, so DS_ACCELERATOR keeps its engine on the CPU.

FROM python:3.12-slim-bookworm AS tools
# g++ builds DeepSpeed's operation for the CPU, and triton wants a C compiler when it first runs on a GPU.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates g++ git make \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 --shell /bin/bash learner
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    DS_ACCELERATOR=cpu \
    PYTHONUNBUFFERED=1
USER 1000

FROM tools AS course
# While an image is built no GPU is seen: uv picks torch's build for this driver instead. Name the oldest driver that the
# image is to run with (nvidia-smi tells it), or leave it empty for a CPU alone.
ARG CUDA_DRIVER=580.65.06
WORKDIR /home/learner/course
COPY --chown=learner:learner . .
# In one layer, so that the eras share torch's files, by hard links, and uv's cache is not kept.
RUN UV_CUDA_DRIVER_VERSION="$CUDA_DRIVER" make setup \
 && rm -rf /home/learner/.cache
EXPOSE 8888
# It listens on all of the container's addresses; the token that it prints is asked for.
CMD [".venv/bin/jupyter", "lab", "--ip=0.0.0.0", "--no-browser", "--notebook-dir=."]
