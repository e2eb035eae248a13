"""The protocols as pure state machines: `actions = machine.on(event, now)`.

Events and actions are frozen dataclasses and time comes in as a number; there is no torch, socket,
thread or clock here. Drivers feed the machines: real ones in `replica/` and `transport/`, simulated
ones in `emulate/`. So what a seeded simulation tries is what runs in production.
"""
