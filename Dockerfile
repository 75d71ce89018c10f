# An image with polyhvd, NumPy and no compiler, for a user who is not root: docker build -t polyhvd .
# `make image` builds it without Docker, too. --build-arg FRAMEWORK=torch (or tensorflow, mxnet, jax) installs a
# framework, INDEX is the package index for it, and BASE an image of Debian or Ubuntu, such as one with CUDA.
ARG BASE=debian:bookworm-slim
FROM ${BASE} AS build
ARG FRAMEWORK=
ARG INDEX=
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-numpy python3-venv
COPY . /src
# What Debian has (NumPy) is not installed once more; of the compiler's output only the wheel is kept.
RUN python3 -m venv --system-site-packages /opt/polyhvd \
    && MAX_JOBS=$(nproc) /opt/polyhvd/bin/pip install --no-cache-dir --no-compile /src \
    && { [ -z "$FRAMEWORK" ] || /opt/polyhvd/bin/pip install --no-cache-dir --no-compile \
        ${INDEX:+--extra-index-url "$INDEX"} "polyhvd[$FRAMEWORK]"; } \
    && /opt/polyhvd/bin/pip uninstall -y setuptools pip

FROM ${BASE}
ARG FRAMEWORK=
# Less what only builds and tests NumPy, and a second copy of a module of it, which is never found.
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-numpy \
        $([ "$FRAMEWORK" != mxnet ] || echo libgomp1 libquadmath0) \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/* /usr/lib/python3.*/dist-packages/numpy \
    && find /usr/lib/python3* -depth -type d \( -name __pycache__ -o -path '*/numpy/*/tests' \
        -o -path '*/numpy/distutils' -o -path '*/numpy/f2py' \) -exec rm -rf {} +
COPY --from=build /opt/polyhvd /opt/polyhvd
ENV PATH=/opt/polyhvd/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONUNBUFFERED=1
# The user cannot write bytecode beside the modules, so that of what every job imports is made here.
RUN python -c 'import polyhvd.numpy, polyhvd.launch.entry' && polyhvdrun -np 2 true \
    && { id -u 1000 >/dev/null 2>&1 || useradd --uid 1000 --create-home polyhvd; } \
    && mkdir /app && chown 1000:1000 /app
WORKDIR /app
# By its number, for Kubernetes' runAsNonRoot.
USER 1000
CMD ["polyhvd", "doctor"]
