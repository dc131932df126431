"""What tests of several folders share: small problems, worker processes, commands, written runs."""
