"""External environments: simulators outside of the job connect to a runner, ask for actions and tell rewards."""
