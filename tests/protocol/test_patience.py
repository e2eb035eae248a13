"""When a waiting caller looks for news itself, and when it gives that up."""

from helixrt.protocol.patience import Spin


def test_looks_that_pay_go_on():
    spin = Spin(1.0)
    for _ in range(1000):
        assert spin.allowance() == 1.0
        spin.paid()


def test_looks_in_vain_end_but_for_a_trial_now_and_then():
    spin = Spin(1.0)
    allowed = 0
    for _ in range(1000):
        if spin.allowance():
            allowed += 1
            spin.in_vain()
    assert 10 <= allowed <= 40


def test_one_trial_that_pays_brings_them_back_and_one_in_vain_ends_them_again():
    spin = Spin(1.0)
    while spin.allowance():
        spin.in_vain()
    while not spin.allowance():
        pass
    spin.paid()
    assert spin.allowance()
    spin.in_vain()
    assert not spin.allowance()


def test_no_looks_where_none_are_wanted():
    spin = Spin(0.0)
    assert not any(spin.allowance() for _ in range(200))
