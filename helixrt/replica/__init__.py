"""One replica's life: quorum, work, exchange, commit, catch-up, and the loader's position.

`contracts` holds what stands between a replica and the world (`Engine`, `Membership`, `RunStore`,
`StateTransport`, `Launcher`); others implement them and they are injected. The rules of a step are in
`protocol/`; this room carries them out. It knows engines only by contract.
"""
