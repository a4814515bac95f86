# syntax=docker/dockerfile:1
# One image for every service; the command chooses which, e.g. `python -m services.dispatcher`.
# Real vLLM workers use Dockerfile.vllm.

FROM python:3.12-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
RUN python -m venv /opt/hexflow
# Dependencies first: they change less often than the code, so this layer is kept.
COPY requirements/base.txt requirements/base.txt
RUN /opt/hexflow/bin/pip install --require-hashes --requirement requirements/base.txt
COPY pyproject.toml README.md LICENSE ./
COPY services services
COPY shared shared
RUN /opt/hexflow/bin/pip install --no-deps .
# Read-only at run time, so byte code has to be made now.
RUN /opt/hexflow/bin/python -m compileall -q /opt/hexflow/lib

FROM python:3.12-slim-bookworm AS service
LABEL org.opencontainers.image.title="hexflow" \
      org.opencontainers.image.description="Deadline-aware scheduling of multi-stage LLM workflows" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/hexflow /opt/hexflow
ENV PATH=/opt/hexflow/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NUMBA_CACHE_DIR=/tmp/hexflow/machine-code \
    MPLCONFIGDIR=/tmp/matplotlib \
    HEXFLOW_CACHE_DIR=/tmp/hexflow
# A number, so that Kubernetes can see that it is not root.
USER 10001:10001
WORKDIR /tmp
EXPOSE 8080
# Nothing is written but to /tmp: run it with a read-only root and a tmpfs there.
CMD ["hexflow", "--help"]

# The same with llama.cpp and a small model for processors: docker build --target small-model .
FROM build AS small-model-build
COPY requirements/dev.txt requirements/dev.txt
# One package of that lock file, with its version and hashes.
RUN awk '/^[^ #]/ {keep = /^xllamacpp==/} keep' requirements/dev.txt > requirements/llamacpp.txt
RUN /opt/hexflow/bin/pip install --no-deps --require-hashes --requirement requirements/llamacpp.txt \
 && HEXFLOW_CACHE_DIR=/opt/small-model /opt/hexflow/bin/hexflow model

FROM service AS small-model
USER root
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libgomp1 \
 && rm -rf /var/lib/apt/lists/*
USER 10001:10001
COPY --from=small-model-build /opt/hexflow /opt/hexflow
COPY --from=small-model-build /opt/small-model /opt/small-model

# What is built unless another target is named.
FROM service
