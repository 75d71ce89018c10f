# What an image needs for an MPIJob beside polyhvd and the program: Open MPI, and ssh without questions, since pods have
# new names and keys each time. MPI's operator mounts the keys, and has sshd run as root.
FROM polyhvd:latest
USER root
RUN apt-get update && apt-get install -y --no-install-recommends openmpi-bin openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/*
RUN mkdir -p /run/sshd && ssh-keygen -A
RUN printf 'Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n' \
    > /etc/ssh/ssh_config.d/mpi.conf
RUN printf 'StrictModes no\nPermitRootLogin prohibit-password\n' > /etc/ssh/sshd_config.d/mpi.conf
COPY train.py .
