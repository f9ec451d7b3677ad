"""The machine: devices, GPUs, their policy, the environment, the terminal."""
