# JupyterLab with the series, at the address with a token that it prints:
#     docker build -t flashattention-notebooks .
#     docker run --rm -p 8888:8888 flashattention-notebooks
# With an NVIDIA GPU, docker build --build-arg TORCH=cuda and docker run --gpus all.
FROM debian:bookworm-slim AS system
RUN apt-get update && \
    apt-get install -y --no-install-recommends ca-certificates g++ git make python3-dev python3-venv && \
    rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --shell /bin/bash reader
USER reader

FROM system
ARG TORCH=cpu
WORKDIR /home/reader/flashattention-notebooks
COPY --chown=reader . .
RUN make installed TORCH=$TORCH
EXPOSE 8888
CMD ["make", "lab", "LAB=--ip=0.0.0.0 --port=8888 --no-browser"]
