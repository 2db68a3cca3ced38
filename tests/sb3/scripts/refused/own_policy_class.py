"""After Stable-Baselines3's documentation, guide/custom_policy, "Advanced Example": a policy class of one's own."""

from stable_baselines3.common.policies import ActorCriticPolicy

from flatout.sb3 import PPO

STEPS = 5_000


class CustomActorCriticPolicy(ActorCriticPolicy):
    pass


PPO(CustomActorCriticPolicy, "CartPole-v1", verbose=1).learn(STEPS)
