# An image with polyhvd and NumPy, no compiler and no framework, for a user who is not root: docker build -t polyhvd .
# `make image` builds it without Docker, too; docs/kubernetes.md says how a framework is added.
FROM debian:bookworm-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-numpy python3-venv
COPY . /src
# What Debian has (NumPy) is not installed once more; of the compiler's output only the wheel is kept.
RUN python3 -m venv --system-site-packages /opt/polyhvd \
    && MAX_JOBS=$(nproc) /opt/polyhvd/bin/pip install --no-cache-dir --no-compile /src \
    && /opt/polyhvd/bin/pip uninstall -y setuptools pip

FROM debian:bookworm-slim
# Less what only builds and tests NumPy, and a second copy of a module of it, which is never found.
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-numpy \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/* /usr/lib/python3.11/dist-packages/numpy \
    && find /usr/lib/python3* -depth -type d \( -name __pycache__ -o -path '*/numpy/*/tests' \
        -o -path '*/numpy/distutils' -o -path '*/numpy/f2py' \) -exec rm -rf {} +
COPY --from=build /opt/polyhvd /opt/polyhvd
ENV PATH=/opt/polyhvd/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONUNBUFFERED=1
# The user cannot write bytecode beside the modules, so that of what every job imports is made here.
RUN python -c 'import polyhvd.numpy, polyhvd.launch.entry' && polyhvdrun -np 2 true \
    && useradd --uid 1000 --create-home polyhvd && mkdir /app && chown polyhvd: /app
WORKDIR /app
# By its number, for Kubernetes' runAsNonRoot.
USER 1000
CMD ["polyhvd", "doctor"]
