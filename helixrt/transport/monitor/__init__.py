"""The monitor process of a rank: a small child process that watches it from outside and reports to the monitors of its peers.

A process that is stopped (SIGSTOP, a debugger) cannot report it, and its kernel goes on acknowledging what its peers send. A
rank that holds its interpreter lock cannot send beats. So both are the task of a process that runs no user code: `process` is
its program, `client.Monitor` the rank's handle on it, `wire` what they say to each other and to other monitors.
"""
