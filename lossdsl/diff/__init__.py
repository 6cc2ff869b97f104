"""Where the gradients of two methods differ: proved where it can be, with a witness where they do, measured on rollouts."""
